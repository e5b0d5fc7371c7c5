"""Results of dispatch and combine on one rank: payloads, waiting, and the choice of weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

import fusco

IDS = torch.tensor([[1, 0], [1, -1]])
WEIGHTS = torch.tensor([[2.0, 3.0], [0.5, 9.0]])


@pytest.fixture
def comm():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with fusco.Communicator(num_experts=2, num_topk=2, max_tokens_per_rank=4, max_bytes_per_token=64) as comm:
        yield comm
    dist.destroy_process_group()


def test_payloads_are_one_tuple_and_rows_are_the_first(comm):
    values, scales = torch.tensor([[1.0], [2.0]]), torch.tensor([7, 8])
    sent = comm.dispatch([values, scales], IDS)
    assert [payload.tolist() for payload in sent.payloads] == [[[1.0], [1.0], [2.0]], [7, 7, 8]]
    assert sent.rows is sent.payloads[0]
    assert [payload.tolist() for payload in comm.dispatch(values, IDS).payloads] == [[[1.0], [1.0], [2.0]]]


def test_results_cannot_be_changed_but_copied_with_other_fields(comm):
    sent = comm.dispatch(torch.ones(2, 1), IDS)
    for result in (sent, sent.handle):
        names = [field.name for field in dataclasses.fields(result)]
        for name in names:
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(result, name, None)
        copy = dataclasses.replace(result, **{names[-1]: 7})
        assert getattr(copy, names[-1]) == 7
        assert all(getattr(copy, name) is getattr(result, name) for name in names[:-1])
    assert fusco.Dispatched((IDS,), IDS, None, sent.handle).event is None


def test_on_the_cpu_there_is_nothing_to_wait_for(comm):
    sent = comm.dispatch(torch.ones(2, 1), IDS, WEIGHTS, with_weights=True, launch=fusco.Launch(own_stream=True))
    assert sent.event is None
    sent.wait()
    assert sent.weights.tolist() == [3.0, 2.0, 0.5]


def test_combine_applies_the_weights_of_the_dispatch_or_none(comm):
    sent = comm.dispatch(torch.zeros(2, 1), IDS, WEIGHTS)
    y = torch.tensor([[1.0], [10.0], [100.0]])
    assert comm.combine(y, sent.handle).tolist() == [[23.0], [50.0]]
    assert comm.combine(y, sent.handle, weights="topk").tolist() == [[23.0], [50.0]]
    assert comm.combine(y, sent.handle, weights=None).tolist() == [[11.0], [100.0]]
    unweighted = comm.dispatch(torch.zeros(2, 1), IDS)
    assert comm.combine(y, unweighted.handle).tolist() == [[11.0], [100.0]]


def test_gradients_of_a_combine_without_weights_are_not_weighted(comm):
    weights = WEIGHTS.clone().requires_grad_()
    sent = comm.dispatch(torch.zeros(2, 1), IDS, weights)
    y = torch.ones(3, 1, requires_grad=True)
    comm.combine(y, sent.handle, weights=None).sum().backward()
    assert y.grad.tolist() == [[1.0]] * 3
    assert weights.grad is None
    comm.combine(y, sent.handle).sum().backward()
    assert y.grad.tolist() == [[4.0], [3.0], [1.5]]
    assert weights.grad.tolist() == [[1.0, 1.0], [1.0, 0.0]]


@pytest.mark.parametrize(
    ("weights", "error", "words"),
    [
        ("softmax", ValueError, "must be 'topk' or None, got 'softmax'"),
        (True, ValueError, "must be 'topk' or None, got True"),
        (torch.ones(3), TypeError, "must be 'topk' or None, got a tensor; multiply y by it, and pass None"),
    ],
)
def test_other_weights_are_refused(comm, weights, error, words):
    sent = comm.dispatch(torch.zeros(2, 1), IDS, WEIGHTS)
    with pytest.raises(error, match=words):
        comm.combine(torch.ones(3, 1), sent.handle, weights=weights)
    assert comm.combine(torch.ones(3, 1), sent.handle).tolist() == [[5.0], [0.5]]


def test_several_tensors_return_together_without_weights(comm):
    sent = comm.dispatch(torch.zeros(2, 1), IDS, WEIGHTS)
    wide, narrow = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]]), torch.ones(3, 1, dtype=torch.bfloat16)
    first, second = comm.combine_all([wide, narrow], sent.handle)
    assert first.tolist() == [[11.0, 22.0], [100.0, 200.0]]
    assert (second.tolist(), second.dtype) == ([[2.0], [1.0]], torch.bfloat16)


def test_rows_of_any_shape_return_in_it(comm):
    sent = comm.dispatch(torch.zeros(2, 1), IDS, WEIGHTS)
    rows = torch.arange(12.0).view(3, 2, 2)
    cubes, transposed, scalars, flags = comm.combine_all(
        [rows, rows.transpose(1, 2), rows[:, 0, 0], rows.view(3, 1, 4, 1)], sent.handle
    )
    expected = torch.stack([rows[0] + rows[1], rows[2]])
    assert torch.equal(cubes, expected)
    assert torch.equal(transposed, expected.transpose(1, 2))
    assert torch.equal(scalars, expected[:, 0, 0])
    assert torch.equal(flags, expected.view(2, 1, 4, 1))
    assert comm.combine_all([torch.zeros(2, 1).requires_grad_()[:0]], comm.dispatch(rows[:0], IDS[:0]).handle)
    for wrong in (rows[:2], torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"y must be \(3, hidden\), as dispatch returned, got \("):
            comm.combine_all([wrong], sent.handle)


def test_weights_go_to_rows_and_values_of_rows_come_back(comm):
    sent = comm.dispatch(torch.zeros(2, 1), IDS)
    assert comm.dispatch_weights(torch.tensor([[5.0, 6.0], [7.0, 8.0]]), sent.handle).tolist() == [6.0, 5.0, 7.0]
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    returned = comm.combine_weights(values, sent.handle)
    assert (returned.tolist(), returned.dtype) == ([[2.0, 1.0], [3.0, 0.0]], torch.float32)


def test_counts_on_the_host_and_rows_that_are_missing(comm):
    exact = comm.dispatch(torch.zeros(2, 1), IDS)
    assert exact.num_rows_per_expert_on_host.tolist() == [1, 2]
    assert (exact.num_rows_needed > len(exact.rows)).tolist() == [False]
    cut = comm.dispatch(torch.zeros(2, 1), IDS, static=fusco.StaticRows(2, on_overflow="drop"))
    assert (cut.num_rows_needed > len(cut.rows)).tolist() == [True]
    assert cut.num_rows_per_expert_on_host.tolist() == [1, 1]


def test_rows_of_each_expert_and_those_that_do_not_fit(comm):
    static = fusco.StaticRows(rows_per_expert=1, on_overflow="drop")
    x = torch.tensor([[1.0], [2.0]])
    sent = comm.dispatch(x, IDS, WEIGHTS, static=static, with_weights=True)
    assert (sent.rows.tolist(), sent.weights.tolist()) == ([[[1.0]], [[1.0]]], [[3.0], [2.0]])
    assert (sent.num_rows_per_expert.tolist(), sent.num_dropped_per_expert.tolist()) == ([1, 1], [0, 1])
    assert (sent.num_rows_needed.tolist(), sent.handle.num_rows, sent.handle.rows_shape) == ([2], 2, (2, 1))
    for y in (sent.rows * 10, sent.rows.view(2, 1) * 10):  # with one row each, in either shape
        assert comm.combine(y, sent.handle).tolist() == [[50.0], [0.0]]
    (of_rows,) = comm.combine_all([sent.rows[:, :, 0]], sent.handle)
    assert of_rows.tolist() == [2.0, 0.0]
    for wrong in (sent.rows[:1], sent.rows[:, :, 0][:, 0]):
        with pytest.raises(ValueError, match=r"y must be \(2, 1, hidden\), as dispatch returned, got \("):
            comm.combine(wrong, sent.handle)
    with pytest.raises(ValueError, match=r"values must have shape \(2, 1\), a value of each row, got \[2\]"):
        comm.combine_weights(torch.ones(2), sent.handle)
    aligned = comm.dispatch(x, IDS, static=fusco.StaticRows(rows_per_expert=3), expert_alignment=3)
    assert aligned.rows.tolist() == [[[1.0], [0.0], [0.0]], [[1.0], [2.0], [0.0]]]
    assert aligned.num_dropped_per_expert.tolist() == [0, 0]


def test_masked_rows_that_do_not_go_together_are_refused(comm):
    x = torch.zeros(2, 1)
    with pytest.raises(ValueError, match="rows_per_expert=3 is not a multiple of expert_alignment=2"):
        comm.dispatch(x, IDS, static=fusco.StaticRows(rows_per_expert=3), expert_alignment=2)
    with pytest.raises(TypeError, match=r"expert_alignment must be an integer, got 1\.5"):
        comm.dispatch(x, IDS, static=fusco.StaticRows(rows_per_expert=3), expert_alignment=1.5)
    with pytest.raises(ValueError, match=f"rows_per_expert={2**30} for 2 experts of this rank are {2**31} rows, more"):
        comm.dispatch(x, IDS, static=fusco.StaticRows(rows_per_expert=2**30))
    with pytest.raises(fusco.RowOverflowError, match="rank 0 needed 2 rows for its local expert 1 in a dispatch into"):
        comm.dispatch(x, IDS, static=fusco.StaticRows(rows_per_expert=1))
    assert comm.dispatch(x, IDS).handle.rows_shape == (3,)


def test_the_compiler_calls_verbs_and_does_not_trace_them(comm):
    def layer(x):
        sent = comm.dispatch(2 * x, IDS, WEIGHTS)
        return 3 * comm.combine(sent.rows + 1, sent.handle)

    x = torch.ones(2, 1, requires_grad=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    out = torch.compile(layer, backend="eager")(x)
    out.sum().backward()
    assert out.tolist() == layer(x).tolist()
    assert x.grad.tolist() == [[30.0], [3.0]]
    traced = torch._dynamo.utils.counters["frames"]["total"]
    assert traced <= 30, (
        f"{traced} functions were traced: more than the layer, its parts after verbs, and their wrappers"
    )
