"""``fusco bench decode`` without its ranks: cases, experts and their quantisation, the reference, records, headline."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
from typer.testing import CliRunner

from fusco.bench.decode import exchanges
from fusco.bench.decode.experts import DecodeExperts, Matrices, dequantize, quantize_rows, reference_outputs
from fusco.bench.decode.job import DecodeJob
from fusco.bench.decode.rank import DecodeModel
from fusco.bench.decode.records import DecodeRecord, Measured, headline, summarize
from fusco.bench.harness.model_job import TINY
from fusco.cli.main import app

SHAPE = replace(TINY, hidden=32, num_heads=4, num_key_value_heads=2, head_dim=8, moe_intermediate=16, vocab=64)
SHAPE = replace(SHAPE, num_experts=8, num_topk=2)
JOB = DecodeJob(
    shape=SHAPE,
    device="cpu",
    num_ranks=2,
    ranks_per_node=2,
    tokens=(1, 4),
    variants=("fusco", "allgather"),
    dtype="float32",
    num_iterations=3,
)


def test_a_micro_batch_has_a_token_at_least():
    assert JOB.cases == [(1, 1), (4, 1), (4, 2)]
    with pytest.raises(ValueError, match="2 micro-batches need 2 tokens at least, got 1"):
        replace(JOB, tokens=(1,), micro_batches=(2,))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_ranks": 3}, "8 experts do not divide evenly among 3 ranks"),
        ({"micro_batches": (1, 4)}, "a step has 1 or 2 micro-batches, not 1, 4"),
        ({"routing": "trace"}, "the trace has top-8 of 128 experts"),
    ],
)
def test_values_that_do_not_fit_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        replace(JOB, **changed)


def test_bytes_are_those_of_the_weights():
    for job in (JOB, replace(JOB, context=7), replace(JOB, dtype="bfloat16", context=7)):
        model = DecodeModel(job, 0)
        tensors = [model.embeddings, model._head]
        for layer in model.layers:
            tensors += [layer.router, layer.experts.up.values, layer.experts.down.values]
            tensors += list(vars(layer.attention).values()) if layer.attention else []
        assert job.num_bytes == sum(each.nbytes for each in tensors)
    halves = replace(JOB, dtype="bfloat16").num_bytes - replace(JOB, dtype="fp8").num_bytes
    assert halves == 2 * 4 * 3 * 16 * 32  # layers, experts here, matrices: one byte of each value


def test_rows_in_fp8_are_within_half_a_step_of_three_bits():
    rows = (
        torch.randn(100, 64, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(-20, 30, 0.5)[:, None]
    )
    values, scales = quantize_rows(rows)
    assert (values.dtype, scales.shape) == (torch.float8_e4m3fn, (100, 1))
    normal = rows.abs() > scales * 2**-6  # smaller ones have fewer bits
    error = (dequantize((values, scales)) - rows).abs() / rows.abs()
    assert error[normal & (scales > 1e-14)].max() <= 1 / 16
    assert values.float().abs().amax(1)[scales[:, 0] > 1e-14].eq(448).all()


def test_experts_do_not_depend_on_the_ranks():
    alone, second = (DecodeModel(replace(JOB, num_ranks=number), number - 1) for number in (1, 2))
    for whole, part in zip(alone.layers, second.layers, strict=True):
        assert whole.experts.up.values[4:].equal(part.experts.up.values)
        assert whole.experts.down.values[4:].equal(part.experts.down.values)
        assert whole.router.equal(part.router)
    assert not alone.layers[0].experts.up.values.equal(alone.layers[1].experts.up.values)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-6), ("bfloat16", 0.01), ("fp8", 0.02)])
def test_masked_and_grouped_rows_and_the_reference_agree(dtype, limit):
    job = replace(JOB, dtype=dtype)
    experts = DecodeExperts.draw(job, 1, range(8))
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(2))
    x = x if dtype == "float32" else x.bfloat16()
    ids = torch.arange(20).remainder(7)[:, None]  # the last expert has no rows
    expected = reference_outputs(job, 1, x, ids, torch.ones(20, 1))
    order = ids[:, 0].argsort(stable=True)
    counts = torch.bincount(ids[:, 0], minlength=8)
    grouped = experts.run(experts.rows_of(x[order]), counts)
    places = torch.zeros(8, 3, 32, dtype=x.dtype)
    for expert in range(7):
        places[expert, : counts[expert]] = x[ids[:, 0] == expert]
    masked = experts.run_masked(experts.rows_of(places))
    flat = torch.cat([masked[expert, : counts[expert]] for expert in range(8)])
    for out in (grouped, flat):
        error = (out.float() - expected[order].float()).norm(dim=1) / expected[order].float().norm(dim=1)
        assert float(error.max()) < limit
    assert float(expected.float().norm(dim=1).min()) > 0


def test_a_matrix_in_fp8_has_a_scale_of_each_output():
    wide = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    matrices = Matrices.of(wide, is_fp8=True)
    assert matrices.scales.shape == (2, 5, 1)
    torch.testing.assert_close(matrices.wide(), wide.float(), rtol=1 / 16, atol=0.01)


def test_attention_is_that_of_each_sequence():
    model = DecodeModel(replace(JOB, context=3), 0)
    attention, x = model.layers[0].attention, torch.randn(2, 32, generator=torch.Generator().manual_seed(4))
    out = attention(x, 2)
    for i in range(2):
        query, key, value = (x[i] @ attention.qkv.T).view(-1, 8).split([4, 2, 2])
        heads = []
        for head in range(4):
            keys = torch.cat([attention.keys[2 + i, head // 2, :3], key[head // 2][None]])
            values = torch.cat([attention.values[2 + i, head // 2, :3], value[head // 2][None]])
            heads.append((keys @ query[head] / 8**0.5).softmax(0) @ values)
        torch.testing.assert_close(out[i], torch.cat(heads) @ attention.out.T)


def record(variant="fusco", tpot_ms=1.0, tokens=8, micro_batches=1, error=0.0):
    ranks = [Measured(layer_error=error, step_error=0.0, times_ms=[tpot_ms] * 3)] * 2
    return summarize(JOB, (tokens, micro_batches), variant, ranks, is_graph=False)


def test_a_record_has_the_slowest_ranks_median_and_says_what_is_wrong():
    ranks = [
        Measured(layer_error=1e-7, step_error=2e-7, times_ms=times) for times in ([1.0, 5.0, 2.0], [3.0, 1.0, 1.0])
    ]
    found = summarize(JOB, (4, 2), "fusco", ranks, is_graph=True)
    assert (found.tpot_ms, found.tokens_per_s, found.verified, found.is_graph) == (3.0, 2667, True, True)
    assert (found.layer_error, found.step_error, found.num_iterations) == (1e-7, 2e-7, 3)
    assert json.loads(json.dumps(asdict(found)))["job"]["tokens"] == [1, 4]
    wrong = [Measured(layer_error=float("inf"), step_error=0.5), ranks[0]]
    found = summarize(JOB, (4, 2), "fusco", [replace(each, times_ms=()) for each in wrong], is_graph=False)
    assert not found.verified
    assert found.tpot_ms == 0
    assert [error.split(" is ")[0] for error in found.errors[:1]] == [
        "the hidden states of a step are 0.5 off, more than 0.0001"
    ]


def test_the_headline_is_the_case_where_fusco_gains_least():
    others = [record("allgather", 3.0), record("baseline", 2.0), record("allgather", 5.0, 64)]
    ours = [record("fusco", 1.5), record("fusco", 1.0, micro_batches=2), record("fusco-masked", 2.0, 64)]
    assert headline([*others, *ours]) == (
        "fusco 1 ms per token at 8 tokens a rank, best other 2 ms (baseline): at least 2.00 times as fast, verified"
    )
    assert headline([record(), record("allgather", 3.0)]).endswith("(allgather): 3.00 times as fast, verified")
    assert headline(ours).startswith("no comparison: it needs one of fusco's variants and another")
    assert headline([*others, record(error=1.0)]) == "no comparison: 1 of 4 results are not verified"


def test_variants_that_cannot_run_say_why():
    assert exchanges.obstacle("deep_ep", "cpu", "bfloat16") == "DeepEP needs GPUs"
    assert "bfloat16" in exchanges.obstacle("fusco-deep_ep", "cuda", "float32")
    assert exchanges.obstacle("allgather", "cpu", "float32") == ""
    done = CliRunner().invoke(app, ["bench", "decode", "--variants", "deep_ep"])
    assert done.exit_code != 0
    assert "no variant can run here: deep_ep: DeepEP needs GPUs" in " ".join(str(done.exception or done.output).split())


def test_records_are_of_their_own_kind():
    assert DecodeRecord.__dataclass_fields__["kind"].default == "bench.decode"
