"""The benchmark's routing: what each pattern promises, and traces in every form."""

from functools import partial

import numpy as np
import pytest
import torch
import workloads

from fusco.bench.inputs.prompts import Batch, draw_batches, prompts_of_ranks
from fusco.bench.inputs.traffic import Trace, internode_rows_lower_bound
from fusco.core.placement import ExpertPlacement

workload = partial(workloads.workload, num_experts=64, hidden=16, num_topk=8, tokens=200)


def nodes_of(load, rank):
    expert_to_node = load.placement.membership_table(load.topology.rank_to_node, torch.device("cpu"))
    return expert_to_node[load.routing(rank).topk_idx]


@pytest.mark.parametrize(
    "pattern", ["uniform", "single-node", "imbalanced", "hot-experts", "hot-spread", "idle-experts"]
)
def test_experts_of_a_token_differ_and_any_process_rebuilds_them(pattern):
    load = workload(pattern)
    ids = load.routing(3).topk_idx
    assert torch.equal(ids, workload(pattern).routing(3).topk_idx)
    assert not torch.equal(ids, load.routing(2).topk_idx)
    assert (ids.sort(dim=1).values.diff(dim=1) > 0).all()
    torch.testing.assert_close(load.routing(0).topk_weights.sum(1), torch.ones(200))


def test_single_node_traffic_stays_on_one_node_for_each_token():
    nodes = nodes_of(workload("single-node"), 1)
    assert (nodes == nodes[:, :1]).all()
    assert set(nodes[:, 0].tolist()) == {0, 1}


def test_imbalanced_traffic_is_bimodal():
    load = workload("imbalanced", nodes=8, per_node=4, tokens=100)
    shares = []
    for rank, local_node in enumerate(load.topology.rank_to_node):
        is_remote = nodes_of(load, rank) != local_node
        assert (is_remote == is_remote[:, :1]).all()  # a token leaves with all its experts, or stays
        shares.append(float(is_remote[:, 0].float().mean()))
    extreme = [share for share in shares if share < 0.15 or share > 0.85]
    assert len(extreme) > len(shares) / 2
    assert min(shares) < 0.15 < 0.85 < max(shares)


def test_tokens_take_experts_in_turn():
    ids = workload("round-robin", num_experts=12, num_topk=5, tokens=3).routing(1).topk_idx
    assert ids.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 0, 1, 2]]


@pytest.mark.parametrize(
    ("pattern", "hot", "busiest"),
    [
        # of 64 experts; three of four tokens choose among these, so that they have 3/4 + 1/4 x their part of all rows
        ("hot-experts", range(16), 0.8125),
        ("hot-spread", range(0, 64, 2), 0.875),
        ("idle-experts", range(32, 64), 1.0),
    ],
)
def test_megatrons_skewed_workloads(pattern, hot, busiest):
    ids = workload(pattern, tokens=2000).routing(0).topk_idx
    is_hot = torch.isin(ids, torch.tensor(hot))
    assert float(is_hot.float().mean()) == pytest.approx(busiest, abs=0.01)
    others = ids[torch.arange(2000) % 4 > 0]
    assert set(others.unique().tolist()) == set(hot)
    with pytest.raises(ValueError, match=f"8 experts per token do not fit in the . of {pattern} traffic"):
        workload(pattern, num_experts=12)


@pytest.mark.parametrize(
    ("pattern", "expert_to_rank", "message"),
    [
        ("imbalanced", [0, 0, 1, 1], "4 experts per token do not fit on one of 2 nodes: node 0 has 2"),
        ("single-node", [0, 0, 0, 0, 0, 1], "4 experts per token do not fit on one of 2 nodes: node 1 has 1"),
        ("imbalanced", [0, 0, 0, 0, 1, 1], "do not fit outside node 0: the other nodes have 2"),
    ],
)
def test_nodes_must_have_a_tokens_experts(pattern, expert_to_rank, message):
    with pytest.raises(ValueError, match=message):
        workload(pattern, 2, 1, placement=ExpertPlacement.explicit(expert_to_rank, 2), num_topk=4)


def test_lower_bound_by_hand():
    trace = Trace(np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 40]]), "by hand")
    load = workload("trace", nodes=2, per_node=1, tokens=2, trace=trace)
    # Experts 0 to 31 are node 0's. Rank 0: its second token wants node 1. Rank 1: both want node 0.
    assert internode_rows_lower_bound(load) == 3


def test_a_short_trace_is_repeated():
    trace = Trace(np.arange(24).reshape(3, 8), "three tokens")
    load = workload("trace", nodes=1, per_node=2, tokens=4, trace=trace)
    assert load.num_repeats == pytest.approx(8 / 3)
    assert load.routing(1).topk_idx[:, 0].tolist() == [8, 16, 0, 8]


def test_traces_come_as_npz_or_npy(tmp_path):
    ids = np.random.default_rng(0).integers(0, 64, (10, 3, 8), dtype=np.uint8)
    np.save(tmp_path / "plain.npy", ids)
    np.savez(tmp_path / "two.npz", first=ids, second=ids + 1, note=np.array("text"))
    assert (Trace.load(tmp_path / "plain.npy", None, 2).topk_idx == ids[:, 2]).all()
    assert (Trace.load(tmp_path / "two.npz", "second", 0).topk_idx == ids[:, 0] + 1).all()
    with pytest.raises(ValueError, match=r"keys first, second, note; choose one with --trace-key"):
        Trace.load(tmp_path / "two.npz", None, 0)
    with pytest.raises(ValueError, match="layers 0 to 2, not 3"):
        Trace.load(tmp_path / "plain.npy", None, 3)
    np.save(tmp_path / "floats.npy", np.zeros((3, 2, 8)))
    with pytest.raises(ValueError, match="not ids"):
        Trace.load(tmp_path / "floats.npy", None, 0)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.full((4, 8), -7), r"the trace ids, layer 0 names expert -7 \(token 0, k 0\), but there are 64"),
        (np.array([[0] * 8, [-1] * 7 + [64]]), r"names expert 64 \(token 1, k 7\), .* 0 to 63, and -1 means none"),
        (np.zeros((0, 8), np.int64), "the trace ids, layer 0 has no tokens"),
        (np.full((4, 8), 2**63 + 5, np.uint64), "names expert 9223372036854775813, more than int64 holds"),
    ],
)
def test_ids_that_are_no_experts_are_refused(ids, message, tmp_path):
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(ValueError, match=message):
        workload("trace", trace=Trace.load(tmp_path / "ids.npy", None, 0))


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04 and no more"], ids=["empty", "junk", "broken zip"])
def test_a_file_that_is_no_trace_is_named(content, tmp_path):
    (tmp_path / "ids.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"/ids.npy is not an npy or npz file of numbers$"):
        Trace.load(tmp_path / "ids.npy", None, 0)


def test_the_shipped_trace_is_qwen3():
    trace = Trace.load(None, None, 47)
    assert trace.topk_idx.shape == (2048, 8)
    assert trace.topk_idx.max() == 127
    assert all(len(set(token)) == 8 for token in trace.topk_idx.tolist())


def test_a_batch_has_its_tokens_and_those_of_the_trace():
    trace = Trace(np.arange(24).reshape(3, 8), "by hand")
    batch = Batch(number=4, num_tokens=(2, 5), first_token=(7, 2))
    load = workload("ragged", nodes=2, per_node=1, tokens=6, trace=trace, batch=batch)
    assert [load.num_tokens(rank) for rank in (0, 1)] == [2, 5]
    assert [len(load.rows(rank)) for rank in (0, 1)] == [2, 5]
    assert [load.routing(rank).topk_idx[:, 0].tolist() for rank in (0, 1)] == [[8, 16], [16, 0, 8, 16, 0]]
    assert len(load.routing(1).topk_weights) == 5
    assert load.num_repeats == 7 / 3
    with pytest.raises(ValueError, match="ragged traffic without a batch"):
        workload("ragged", trace=trace)


@pytest.mark.parametrize("prefill", ["one-prompt", "ragged"])
def test_batches_of_a_prefill_depend_on_the_seed_alone_and_fit(prefill):
    batches = draw_batches(prefill, 3, max_tokens=512, num_ranks=4, seed=1)
    assert batches == draw_batches(prefill, 3, max_tokens=512, num_ranks=4, seed=1)
    assert batches != draw_batches(prefill, 3, max_tokens=512, num_ranks=4, seed=2)
    assert [batch.number for batch in batches] == [0, 1, 2]
    assert all(0 < num <= 512 for batch in batches for num in batch.num_tokens)
    in_order = prompts_of_ranks(prefill, 512, 12)
    first = draw_batches(prefill, 3, max_tokens=512, num_ranks=4, seed=0)
    assert [num for batch in first for num in batch.num_tokens] == list(map(sum, in_order))
