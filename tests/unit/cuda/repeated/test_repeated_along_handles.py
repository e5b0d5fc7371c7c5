"""Repeated ``dispatch_again`` and ``combine_all`` return and raise what others do, along any handle."""

from __future__ import annotations

import pytest
import torch
from repeated_rig import CASES, HIDDEN, MAX_TOKENS, Node, inputs

from fusco import MismatchError, RejectedInputError

ALONG = {
    "a row": lambda comm, x, handle: comm.dispatch_again(x, handle),
    "two payloads": lambda comm, x, handle: comm.dispatch_again([x, x[:, :4].contiguous()], handle),
    "sums": lambda comm, x, handle: comm.combine_all([rows_like(handle, x)], handle),
    "sums of two": lambda comm, x, handle: comm.combine_all(
        [rows_like(handle, x), rows_like(handle, x[:, :4])], handle
    ),
}


def rows_like(handle, x):
    return torch.arange(handle.num_rows * x.shape[1]).view(handle.num_rows, -1).to(x.dtype) + x[0]


def handles_of(comm, steps=range(3), **options):
    return [comm.dispatch(*inputs(comm.rank, step), **options).handle for step in steps]


@pytest.mark.parametrize("verb", ALONG)
def test_repeated_calls_along_handles_return_what_others_do(verb, repeats, repeats_along_plans):
    def program(comm, other, _library):
        both = [handles_of(each) for each in (comm, other)]
        assert len({handle.num_rows for handle in both[0]}) > 1
        for step in range(7):  # by turns along three handles
            x = inputs(comm.rank, step)[0]
            made = [ALONG[verb](each, x, handles[step % 3]) for each, handles in zip((comm, other), both, strict=True)]
            assert all(map(torch.equal, *made)), step
        assert comm.profile.operation.partition(" ")[0] == ("combine_all" if "sums" in verb else "dispatch_again")
        assert comm.profile.num_sms == other.profile.num_sms

    Node().run(program)
    assert (repeats_along_plans(), repeats()[1]) == ((0, 2 * 4) if "sums" in verb else (2 * 4, 0))


def test_rows_of_any_shape_return_in_it():
    def program(comm, _other, _library):
        x = inputs(comm.rank, 0)[0]
        (handle,) = handles_of(comm, range(1))
        rows = rows_like(handle, x)
        flat, columns = comm.combine_all([rows, rows[:, :1].contiguous()], handle)
        for _ in range(4):
            cubes, scalars = comm.combine_all([rows.view(len(rows), 2, 1, -1), rows[:, 0]], handle)
            assert torch.equal(cubes, flat.view(len(flat), 2, 1, -1))
            assert torch.equal(scalars, columns.view(-1))

    Node().run(program)


def test_handles_of_other_sizes_are_no_repetition(repeats, repeats_along_plans):
    """Rank 1 has fewer tokens for some handles, in others all ranks have fewer experts per token, or no weights."""

    def program(comm, other, _library):
        def call(each, step):
            x, ids, weights = inputs(each.rank, step)
            kind = (0, 0, 0, 0, 1, 2, 3, 0, 4)[step]
            num_tokens = 5 if (kind == 1 and each.rank == 1) or kind == 2 else MAX_TOKENS
            x, ids, weights = (of[:num_tokens] for of in (x, ids, weights))
            if kind == 3:
                ids, weights = ids[:, :1].contiguous(), weights[:, :1].contiguous()
            handle = each.dispatch(x, ids, None if kind == 4 else weights).handle
            (rows,) = each.dispatch_again(x + 1, handle)
            sums = each.combine_all([rows, rows], handle)
            return [rows, *sums, each.combine(rows, handle)]

        for step in range(9):
            assert all(map(torch.equal, call(comm, step), call(other, step))), step

    Node().run(program)
    # Steps 3 and 7, whose handles are as before, and on rank 0 none of the others.
    assert repeats_along_plans() == 2 * 2
    assert repeats()[1] == 2 * 2 * 2


def test_other_inputs_along_a_handle_are_no_repetition(repeats_along_plans):
    def program(comm, other, _library):
        x = inputs(comm.rank, 0)[0]
        narrow, columns = x[:, :4].contiguous(), torch.cat([x, -x], 1)[:, :HIDDEN]
        learnt, misaligned = x.clone().requires_grad_(), torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
        handles = [handles_of(each)[0] for each in (comm, other)]
        for payloads in ([x, narrow], [narrow, x], [x, narrow.int()], [columns], [x], [learnt], [misaligned]):
            for _ in range(2 if payloads[0] is misaligned else 4):
                made = [
                    each.dispatch_again(payloads, handle) for each, handle in zip((comm, other), handles, strict=True)
                ]
                assert [of.requires_grad for of in made[0]] == [of.requires_grad for of in made[1]]
                assert all(map(torch.equal, *made))

    Node().run(program)
    # The fourth of each, but of columns and of misaligned rows, which are copied.
    assert repeats_along_plans() == 2 * 5


def test_ranks_that_repeat_along_another_handle_or_by_another_verb_notice(repeats_along_plans):
    def program(comm, _other, _library):
        handles, x = handles_of(comm), inputs(comm.rank, 0)[0]
        for _ in range(4):
            (rows,) = comm.dispatch_again(x, handles[0])
            comm.combine_all([rows], handles[0])
        with pytest.raises(MismatchError, match="handle is"):
            comm.dispatch_again(x, handles[comm.rank])
        with pytest.raises(MismatchError, match="dispatch_again on rank 0, combine_all on rank 1"):
            comm.combine_all([rows], handles[0]) if comm.rank else comm.dispatch_again(x, handles[0])
        with pytest.raises(ValueError if comm.rank else RejectedInputError, match="shape"):
            comm.dispatch_again(x[comm.rank :], handles[0])
        assert torch.equal(comm.dispatch_again(x, handles[0])[0], rows)

    Node().run(program)
    assert repeats_along_plans() == 2 * 2


def test_handles_of_another_communicator_are_refused_by_calls_that_could_be_repeated():
    def program(comm, other, _library):
        (handle,), (foreign,), x = handles_of(comm, [0]), handles_of(other, [0]), inputs(comm.rank, 0)[0]
        for _ in range(4):
            (rows,) = comm.dispatch_again(x, handle)
            comm.combine_all([rows], handle)
        for call in (lambda: comm.dispatch_again(x, foreign), lambda: comm.combine_all([rows], foreign)):
            with pytest.raises(ValueError, match="comes from another communicator"):
                call()

    Node().run(program)


def test_unused_rows_along_a_static_handle_are_filled_if_pytorch_is_deterministic():
    def program(comm, _other, _library):
        (handle,), x = handles_of(comm, [0], **CASES["static"]), inputs(comm.rank, 0)[0]
        return all(bool(comm.dispatch_again(x, handle)[0][-1].isnan().all()) for _ in range(5))

    torch.use_deterministic_algorithms(True)
    try:
        assert all(Node().run(program).values())
    finally:
        torch.use_deterministic_algorithms(False)
