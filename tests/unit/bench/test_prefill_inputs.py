"""``fusco bench prefill`` without its ranks: batches, routing, the model's local parts, the comparison, the records."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import asdict, fields, replace
from importlib import resources

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="fusco bench prefill needs transformers: pip install 'transformers>=5.9'")

from typer.testing import CliRunner

from fusco.bench.harness.json_lines import write_json_lines
from fusco.bench.harness.model_job import LAYER_LIMITS, TINY
from fusco.bench.inputs.prompts import describe_prompts, prompt_lengths
from fusco.bench.prefill import variants
from fusco.bench.prefill.iterations import CallClock, Iteration, measure, outliers
from fusco.bench.prefill.job import PrefillJob, check_routing, make_routing, rows_per_rank
from fusco.bench.prefill.model import PrefillModel, Prompts, packed_attention
from fusco.bench.prefill.records import Case, Measured, _record_of, resume, summarize
from fusco.bench.prefill.variants import Deviation, compare_layer, compare_logits, relative_error
from fusco.cli import running
from fusco.cli.main import app
from fusco.fsdp.qwen3 import Qwen3Shape

SHAPE = replace(TINY, hidden=32, num_heads=2, num_key_value_heads=1, head_dim=16, moe_intermediate=16, vocab=64)
JOB = PrefillJob(
    shape=SHAPE,
    device="cpu",
    num_ranks=2,
    ranks_per_node=2,
    tokens=64,
    batches=("1", "ragged"),
    variants=("fusco", "torch"),
    dtype="float32",
    num_iterations=3,
)


def test_ragged_prompts_are_those_of_the_trace_in_order_of_arrival():
    with resources.as_file(resources.files("fusco.data") / "azure_llm_2023_conv.npz") as path:
        trace = np.load(path)["context_tokens"].tolist()
    ranks = prompt_lengths("ragged", 8192, 3)
    flat = [length for rank in ranks for length in rank]
    assert flat == trace[: len(flat)]
    end = 0
    for rank in ranks:
        end += len(rank)
        assert sum(rank) <= 8192 < sum(rank) + trace[end]
    assert max(sum(rank) for rank in prompt_lengths("ragged", 100, 2)) <= 100


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_a_rank_has_a_prompt_however_few_its_tokens(tokens):
    assert all(sum(rank) for batch in ("1", "ragged", "skewed") for rank in prompt_lengths(batch, tokens, 4))


@pytest.mark.parametrize(
    ("batch", "message"), [("0", "'0' is neither"), ("long", "'long' is neither"), ("3", "3 equal prompts do not")]
)
def test_other_batches_are_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        prompt_lengths(batch, 64, 2)
    assert describe_prompts("4", prompt_lengths("4", 64, 2)) == "4 x 16"


def test_the_trace_is_replayed_layer_by_layer_from_another_token_on_each_rank():
    with resources.as_file(resources.files("fusco.data") / "qwen3_30b_a3b_sharegpt1024.npz") as path:
        trace = np.load(path)["topk_idx"].astype(np.int64)
    for rank, first in ((0, 0), (1, 1024)):
        ids = make_routing("trace", (3, 1500, 128, 8), rank, 2, 0).numpy()
        assert ids.shape == (3, 1500, 8)
        for layer in range(3):
            assert (ids[layer] == trace[(np.arange(1500) + first) % 2048, layer]).all()
    assert make_routing("trace", (49, 4, 128, 8), 0, 1, 0)[48].tolist() == trace[:4, 0].tolist()


def test_random_routing_names_different_experts_and_all_of_them():
    ids = make_routing("random", (2, 500, 16, 4), 0, 2, 7)
    assert ids.equal(make_routing("random", (2, 500, 16, 4), 0, 2, 7))
    assert not ids.equal(make_routing("random", (2, 500, 16, 4), 1, 2, 7))
    assert (ids.sort(2).values.diff(dim=2) > 0).all()
    assert ids.unique().tolist() == list(range(16))
    rows = rows_per_rank(ids, 16, 2)
    assert rows.tolist() == [[int((layer < 8).sum()), int((layer >= 8).sum())] for layer in ids]


def test_routings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="'even' is not one of random, trace"):
        check_routing("even", 128, 8)
    with pytest.raises(ValueError, match="not top-2 of 64"):
        check_routing("trace", 64, 2)


def test_packed_attention_is_that_of_each_prompt():
    query, key, value = torch.randn(1, 4, 12, 8), torch.randn(1, 2, 12, 8), torch.randn(1, 2, 12, 8)
    packed, _ = packed_attention(torch.nn.Identity(), query, key, value, None, scaling=0.5, prompt_lengths=(5, 7))
    assert packed.shape == (1, 12, 4, 8)
    causal = torch.ones(7, 7).tril().log()
    for head in range(4):
        scores = query[0, head, 5:] @ key[0, head // 2, 5:].T * 0.5 + causal
        torch.testing.assert_close(packed[0, 5:, head], scores.softmax(1) @ value[0, head // 2, 5:])


def test_a_rank_has_its_experts_only_and_the_weights_do_not_depend_on_the_ranks():
    alone, second = PrefillModel(replace(JOB, num_ranks=1), 0), PrefillModel(JOB, 1)
    for whole, part in zip(alone.experts, second.experts, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            assert part.local(name).shape[0] == 64 == part.module.num_experts
            assert part.local(name).equal(whole.local(name)[64:])
            assert part.local(name).std() > 0.01
        assert part.num_experts == whole.num_experts == 128
    sizes = [sum(each.numel() for each in model._model.parameters()) for model in (alone, second)]
    assert sizes[0] - sizes[1] == 2 * 64 * 3 * 16 * 32
    norms = 2 * (2 * 32 + 2 * 16) + 32
    assert 4 * (sizes[1] - norms) == JOB.parameter_bytes
    prompts = Prompts.make((3, 5), JOB, 0)
    assert prompts.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert prompts.last.tolist() == [2, 7]


def test_the_default_shape_is_that_of_qwen3_30b_a3b():
    job = replace(JOB, shape=Qwen3Shape(), num_ranks=1, dtype="bfloat16")
    assert job.parameter_bytes / 2 == pytest.approx(30.53e9, rel=1e-3)


def test_a_job_of_odd_sizes_is_refused():
    with pytest.raises(ValueError, match="128 experts do not divide evenly among 3 ranks"):
        replace(JOB, num_ranks=3)
    with pytest.raises(ValueError, match="'zipf' is not one of random, trace"):
        replace(JOB, routings=("zipf",))
    with pytest.raises(ValueError, match="do not divide 64"):
        replace(JOB, batches=("5",))


def test_errors_are_relative_to_each_token_and_nan_is_infinite():
    expected = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    assert relative_error(expected + torch.tensor([[0.0, 0.5], [0.5, 0.0]]), expected).tolist() == pytest.approx(
        [0.1, 1]
    )
    assert relative_error(torch.tensor([[torch.nan, 1.0]]), torch.ones(1, 2)).tolist() == [torch.inf]


def test_a_layer_beyond_its_limit_and_another_bit_fail():
    x, ids, weights = torch.randn(4, 8), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    limit = LAYER_LIMITS["float32"]
    layers = {
        "fusco": lambda *_: x,
        "fusco-32": lambda *_: x * (1 + 2e-7),
        "torch": lambda *_: x * (1 + 3 * limit),
        "deep_ep": lambda *_: x * (1 + 0.1 * limit),
    }
    deviations = {name: Deviation() for name in layers}
    assert compare_layer(layers, lambda *_: x, (x, ids, weights), deviations) is x
    failures = {name: deviation.failures("float32") for name, deviation in deviations.items()}
    assert not failures["fusco"]
    assert not failures["deep_ep"]
    assert "differ from those of fusco" in failures["fusco-32"][0]
    assert "the output of a layer is" in failures["torch"][0]


def test_logits_are_compared_for_all_tokens():
    hidden, head, deviation = torch.randn(600, 8), torch.randn(8, 30), Deviation()
    other = hidden.clone()
    other[599] *= -1.0
    compare_logits(other, hidden, lambda rows: rows @ head, deviation)
    assert deviation.logits == pytest.approx(2.0)
    assert deviation.typical_logits == 0
    assert deviation.num_same_tokens == 599
    assert "the logits of a token are 2 off" in deviation.failures("float32")[0]


def iteration_of(ms, **more):
    names = [each.name for each in fields(Iteration)]
    return Iteration(**{**dict.fromkeys(names, 0), "longest": "dispatch of layer 1", "ms": ms, **more})


def record_of(*deviations):
    case = Case(batch="skewed: 64, 8", routing="random", lengths=[(64,), (8,)], imbalance=1.5)
    sections = {"dispatch": 1.0, "combine": 2.0, "prefill": 12.0}
    iterations = [[iteration_of(ms, cpu_ms=1.0), iteration_of(9.0, cpu_ms=ms / 2)] for ms in (10.0, 12.0, 20.0)]
    measured = Measured(iterations=iterations, section_ms=sections, deviations=deviations)
    return summarize(JOB, case, "fusco", measured, 3 << 30)


def test_a_record_has_medians_and_the_worst_of_all_ranks():
    record = record_of(Deviation(layer=1e-6, num_same_tokens=60), Deviation(layer=2e-6, num_same_tokens=8))
    assert (record.ttft_ms, record.num_iterations) == (12.0, 3)
    assert 19.0 < record.p99_ms <= 20.0
    assert record.tokens_per_s == 6000
    assert (record.slowest_ms, record.busiest_cpu_ms) == (20.0, 6.0)
    assert record.shuffle_share == 0.25
    assert (record.layer_error, record.same_next_tokens) == (2e-6, round(68 / 72, 5))
    assert (record.batch, record.peak_memory_gib, record.verified) == ("skewed: 64, 8", 3.0, True)


def test_a_failed_comparison_ends_the_command_with_1_and_says_where(monkeypatch):
    failed = record_of(Deviation(), Deviation(layer=0.5))
    assert failed.errors == ["rank 1: the output of a layer is 0.5 off, more than 1e-05"]
    monkeypatch.setattr(running, "run_on_ranks", lambda *_, **__: [[failed]] * 2)
    done = CliRunner().invoke(app, ["bench", "prefill"])
    assert done.exit_code == 1
    assert "random, skewed: 64, 8, fusco: rank 1: the output of a layer is 0.5 off" in done.output.replace("\n", " ")


def test_what_cannot_run_here_is_skipped_with_its_reason(monkeypatch):
    monkeypatch.setattr(variants, "installed", lambda _: "5.17.0")
    assert variants.obstacle("transformers", "cuda", "bfloat16") == (
        "transformers 5.17.0 has no all_to_all; 5.23 is the first that has it"
    )
    monkeypatch.setattr(variants, "installed", lambda _: "")
    assert variants.obstacle("transformers", "cpu", "float32").startswith("transformers is not installed; 5.23 is")
    assert "no SMs" in variants.obstacle("fusco-32", "cpu", "float32")
    assert "rows sized exactly" in variants.obstacle("fusco-static", "cuda", "float32")
    assert not any(variants.obstacle(name, "cuda", "bfloat16") for name in ("fusco", "fusco-32", "fusco-static"))
    done = CliRunner().invoke(app, ["bench", "prefill", "--variants", "fusco-32"])
    assert done.exit_code != 0
    assert "no variant can run here: fusco-32: there are no SMs on the CPU" in str(done.exception)


def test_a_rank_without_tokens_has_nothing_to_compare():
    deviation, none = Deviation(), torch.zeros(0, 4)
    compare_logits(none, none, lambda hidden: hidden, deviation)
    compare_layer({"fusco": lambda x, *_: x}, lambda x, *_: x, (none, none, none), {"fusco": deviation})
    assert deviation == Deviation()


def test_norms_are_those_of_transformers():
    norms = [each for each in PrefillModel(JOB, 0)._model.modules() if hasattr(each, "variance_epsilon")]
    assert len(norms) == SHAPE.num_layers * 4 + 1
    for norm in norms:
        x = torch.randn(3, len(norm.weight))
        norm.weight.data.uniform_(0.5, 2.0)
        torch.testing.assert_close(norm(x), type(norm).forward(norm, x))


def test_a_slow_prefill_is_explained_rank_by_rank():
    usual, slow = iteration_of(80.0, dispatch_ms=4.0), iteration_of(263.0, dispatch_ms=190.0, preemptions=7)
    quick = [[usual, usual]] * 4
    assert outliers([*quick, [usual, iteration_of(100.0)]]) == []
    first, *ranks = outliers([*quick, [iteration_of(81.0), slow]])
    assert first.startswith("prefill 5 of 5 took 263.0 ms, 3.29 times the median")
    assert ranks[0].startswith("  rank 0: 81.0 (80.0) ms: dispatch 0.0 (4.0), ")
    assert ranks[1].startswith("  rank 1: 263.0 (80.0) ms: dispatch 190.0 (4.0), ")
    assert "dispatch of layer 1" in ranks[1]
    assert "7 preemptions" in ranks[1]


def test_a_prefill_is_measured_with_its_calls_and_garbage_collections():
    clock = CallClock("cpu")

    def align():
        clock.mark("dispatch")  # of an earlier prefill that failed
        time.sleep(0.02)
        gc.collect()

    def work():
        for layer in range(2):
            with clock.timed("dispatch"):
                time.sleep(0.002 + 0.03 * layer)
            with clock.timed("combine"):
                gc.collect(0)
        time.sleep(0.003)

    found = measure(align, work, clock, "cpu")
    assert found.longest == "dispatch of layer 1"
    assert 32 <= found.longest_ms <= found.dispatch_ms - 2
    assert 0 < found.gc_ms <= found.combine_ms
    assert found.rest_ms >= 3
    assert found.cpu_ms + 37 <= found.ms
    assert found.dispatch_ms + found.combine_ms + found.rest_ms <= found.ms + 0.01
    assert (found.device_allocations, found.device_growth_bytes) == (0, 0)


def test_a_resumed_job_runs_the_cases_that_are_missing(tmp_path):
    path = tmp_path / "prefill.jsonl"
    job = replace(JOB, batches=("skewed", "1"), routings=("random", "trace"), variants=("fusco", "torch"))
    record = replace(record_of(Deviation(), Deviation()), job=asdict(job))
    assert resume(job, path) == (job, [], [])
    other, third = replace(record, variant="torch"), replace(record, variant="transformers")
    others = [replace(other, commit="another"), replace(other, job=asdict(replace(job, seed=1))), third]
    write_json_lines([record, *others], path)
    of_others = path.read_text().splitlines()[1:]
    assert resume(job, path) == (job, [], of_others)  # they stay, and the incomplete case runs again
    write_json_lines([other], path, appends=True)
    complete = path.read_text().splitlines()
    with path.open("a") as lines:
        lines.write('{"kind": "prefill", "varia')  # killed while it wrote
    resumed, kept, stay = resume(job, path)
    assert stay == complete
    assert [each.variant for each in kept] == ["fusco", "torch"]
    assert kept[0] == replace(record, **{name: getattr(kept[0], name) for name in ("lengths", "job")})
    assert resumed.cases == [("random", "1"), ("trace", "skewed"), ("trace", "1")]


def test_records_are_strict_json_and_resumed_without_what_it_lacks(tmp_path):
    path = tmp_path / "prefill.jsonl"
    wrong = replace(record_of(Deviation(), Deviation()), layer_error=float("inf"), p99_ms=float("nan"))
    write_json_lines([wrong], path)
    values = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert values == json.loads(json.dumps(asdict(wrong) | {"layer_error": None, "p99_ms": None}))
    assert _record_of(values).layer_error == float("inf")


def test_only_files_of_records_are_resumed(tmp_path):
    path = tmp_path / "notes"
    for content, line in (("[1, 2]\n", 1), ("{}\nnotes\n{}\n", 2), ("notes", 1), ("\udcff", 1)):
        path.write_bytes(content.encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=f"notes cannot be resumed: line {line} is not a record"):
            resume(JOB, path)
    of_another_version = asdict(record_of(Deviation(), Deviation())) | {"iterations": [[{"seconds": 1.0}]]}
    path.write_text(json.dumps(of_another_version))
    assert resume(JOB, path).lines == [json.dumps(of_another_version)]


def test_resuming_needs_a_file():
    done = CliRunner().invoke(app, ["bench", "prefill", "--resume"])
    assert "--resume needs --json FILE" in str(done.exception)
