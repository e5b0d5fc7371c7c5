"""Invalid calls, and calls that do not match those of the other ranks: each with its error."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

import fusco

HIDDEN = 3
META = torch.device("meta")


@dataclass
class Scene:
    """A communicator after one dispatch, and valid arguments for the next calls, used unless others are given."""

    comm: fusco.Communicator
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    handle: fusco.Handle
    y: torch.Tensor

    def dispatch(self, x: Any = ..., ids: Any = ..., weights: Any = ..., **more: Any) -> fusco.Dispatched:
        given = [mine if theirs is ... else theirs for theirs, mine in ((x, self.x), (ids, self.ids))]
        return self.comm.dispatch(*given, self.weights if weights is ... else weights, **more)

    def combine(self, y: Any = ..., **more: Any) -> torch.Tensor:
        return self.comm.combine(self.y if y is ... else y, self.handle, **more)

    def wide(self, width: int) -> torch.Tensor:
        return torch.ones(len(self.x), width)

    def ids_with(self, k: int, expert: int) -> torch.Tensor:
        ids = self.ids.clone()
        ids[0, k] = expert
        return ids


def whole(base: torch.Tensor) -> fusco.Segments:
    return fusco.Segments(base, torch.tensor([0]), torch.tensor([base.nbytes]))


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def quantised(tensor: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


class OfMesh(TwoTensor):
    """A tensor subclass whose values are in other tensors, as in DTensor."""


class WithoutItems(UserDict):
    """A mapping that fails where it is read."""

    def __getitem__(self, rank: int) -> fusco.Segments:
        raise LookupError("an item that is gone")


def weights_that_cannot_be_read(scene: Scene) -> None:
    out_of_memory = torch.OutOfMemoryError("no memory for weights")
    weights = scene.weights.bfloat16()  # which travel as float32
    with mock.patch.object(torch.Tensor, "float", side_effect=out_of_memory):
        scene.dispatch(weights=weights)


def combine_along_changed_weights(scene: Scene) -> None:
    weights = scene.weights.clone().requires_grad_()
    handle = dataclasses.replace(scene.handle, topk_weights=weights, weights_version=weights._version)
    with torch.no_grad():
        weights.mul_(2)
    scene.comm.combine(scene.y, handle)


def rows_with_a_tangent(scene: Scene) -> None:
    with forward_ad.dual_level():
        scene.dispatch(forward_ad.make_dual(scene.x, scene.x))


def rows_while_faking(scene: Scene) -> None:
    with FakeTensorMode():
        scene.dispatch()


def shuffle_of_freed_memory(scene: Scene) -> None:
    base = torch.zeros(2)
    segments = whole(base)
    freed(base)
    scene.comm.shuffle({0: segments}, {})


def shuffle_to_all(scene: Scene) -> None:
    scene.comm.shuffle({rank: whole(torch.zeros(2)) for rank in range(scene.comm.topology.world_size)}, {})


def fail_before_a_verb(scene: Scene) -> None:
    with scene.comm.rejecting():
        raise LookupError("no such layer")


def exchange_of_quantised_rows(scene: Scene) -> None:
    source = quantised(torch.ones(4, HIDDEN))
    scene.comm.all_to_all(torch.empty_like(source), source)


# Valid calls by verb.
GOOD: dict[str, Callable[[Scene], Any]] = {
    "dispatch": Scene.dispatch,
    "dispatch_again": lambda s: s.comm.dispatch_again(s.x, s.handle),
    "combine": Scene.combine,
    "shuffle": lambda s: s.comm.shuffle({}, {}),
    "all_to_all": lambda s: s.comm.all_to_all(torch.zeros(4, HIDDEN), torch.ones(4, HIDDEN)),
    "combine_all": lambda s: s.comm.combine_all([s.y], s.handle),
    "dispatch_weights": lambda s: s.comm.dispatch_weights(s.weights, s.handle),
    "combine_weights": lambda s: s.comm.combine_weights(s.y[:, 0], s.handle),
}


@dataclass(frozen=True)
class Mistake:
    """A call of one rank, the verb that all others call, the type of the error, and phrases of its text."""

    call: Callable[[Scene], Any]
    kind: str
    phrases: list[str]
    verb: str = "dispatch"


VALUE, TYPE = "ValueError", "TypeError"

BAD_INPUTS = {
    "ids_of_wrong_dtype": Mistake(lambda s: s.dispatch(ids=s.ids.float()), TYPE, ["int32 or int64", "torch.float32"]),
    "ids_of_wrong_shape": Mistake(lambda s: s.dispatch(ids=s.ids[:, 0], weights=None), VALUE, ["topk_idx"]),
    "ids_as_list": Mistake(lambda s: s.dispatch(ids=s.ids.tolist()), TYPE, ["topk_idx", "list"]),
    "id_too_large": Mistake(
        lambda s: s.dispatch(ids=s.ids_with(1, s.comm.placement.num_experts)), VALUE, ["topk_idx[0, 1] = 8", "0 to 7"]
    ),
    "id_below_minus_one": Mistake(
        lambda s: s.dispatch(ids=s.ids_with(0, -2)), VALUE, ["topk_idx[0, 0] = -2", "0 to 7"]
    ),
    "ids_on_another_device": Mistake(
        lambda s: s.dispatch(ids=s.ids.to(META), weights=None), VALUE, ["topk_idx", "meta", "the communicator on"]
    ),
    "too_many_experts": Mistake(
        lambda s: s.dispatch(ids=s.ids.repeat(1, 2), weights=None), VALUE, ["6 experts per token", "3"]
    ),
    "too_many_tokens": Mistake(
        lambda s: s.dispatch(torch.ones(100, HIDDEN), torch.zeros(100, s.ids.shape[1], dtype=torch.int64), None),
        VALUE,
        ["100 tokens", "max_tokens_per_rank=20"],
    ),
    "rows_too_wide": Mistake(lambda s: s.dispatch(s.wide(65)), VALUE, ["260 bytes", "max_bytes_per_token=256"]),
    "rows_too_wide_together": Mistake(
        lambda s: s.dispatch([s.wide(33)] * 2), VALUE, ["264 bytes", "max_bytes_per_token=256"]
    ),
    "rows_without_elements": Mistake(lambda s: s.dispatch(s.wide(0)), VALUE, ["without elements"]),
    "too_few_rows": Mistake(lambda s: s.dispatch(s.x[1:]), VALUE, ["payload 0", "tokens"]),
    "no_payload": Mistake(lambda s: s.dispatch([]), VALUE, ["1 to 8 payloads", "got 0"]),
    "nine_payloads": Mistake(lambda s: s.dispatch([s.x] * 9), VALUE, ["1 to 8 payloads", "got 9"]),
    "rows_of_no_tensor": Mistake(lambda s: s.dispatch(None), TYPE, ["payload 0", "NoneType"]),
    "rows_on_another_device": Mistake(
        lambda s: s.dispatch(s.x.to(META)), VALUE, ["payload 0", "meta", "the communicator on"]
    ),
    "sparse_rows": Mistake(lambda s: s.dispatch(s.x.to_sparse()), TYPE, ["payload 0", "sparse"]),
    "weights_of_wrong_shape": Mistake(
        lambda s: s.dispatch(weights=s.weights[:, :1]), VALUE, ["topk_weights has shape"]
    ),
    "weights_of_wrong_dtype": Mistake(lambda s: s.dispatch(weights=s.ids), TYPE, ["topk_weights", "torch.int64"]),
    "weights_wanted_but_not_given": Mistake(
        lambda s: s.dispatch(weights=None, with_weights=True), VALUE, ["with_weights"]
    ),
    "alignment_of_zero": Mistake(lambda s: s.dispatch(expert_alignment=0), VALUE, ["expert_alignment", "0"]),
    "alignment_of_no_integer": Mistake(lambda s: s.dispatch(expert_alignment=1.5), TYPE, ["expert_alignment", "1.5"]),
    "alignment_beyond_counting": Mistake(
        lambda s: s.dispatch(expert_alignment=10**12), VALUE, ["at most 2147483647, got 1000000000000"]
    ),
    "weights_that_cannot_be_read": Mistake(weights_that_cannot_be_read, "OutOfMemoryError", ["no memory for weights"]),
    "gradients_of_two_payloads": Mistake(
        lambda s: s.dispatch([s.x, s.x.clone().requires_grad_()]), VALUE, ["single payload"]
    ),
    "again_with_other_tokens": Mistake(
        lambda s: s.comm.dispatch_again(torch.ones(len(s.x) + 1, HIDDEN), s.handle),
        VALUE,
        ["payload 0", "tokens"],
        "dispatch_again",
    ),
    "again_along_no_handle": Mistake(
        lambda s: s.comm.dispatch_again(s.x, s.handle.plan), TYPE, ["handle", "Plan"], "dispatch_again"
    ),
    "y_of_wrong_length": Mistake(
        lambda s: s.combine(torch.ones(len(s.y) + 1, HIDDEN)), VALUE, ["y must be"], "combine"
    ),
    "y_of_three_dimensions": Mistake(lambda s: s.combine(s.y[:, :, None]), VALUE, ["y must be"], "combine"),
    "y_of_wrong_dtype": Mistake(lambda s: s.combine(s.y.long()), TYPE, ["torch.int64"], "combine"),
    "y_too_wide": Mistake(
        lambda s: s.combine(torch.ones(len(s.y), 65)), VALUE, ["260 bytes", "max_bytes_per_token=256"], "combine"
    ),
    "y_of_no_tensor": Mistake(lambda s: s.combine(s.y.tolist()), TYPE, ["y must be a tensor", "list"], "combine"),
    "combine_with_a_tensor_of_weights": Mistake(
        lambda s: s.combine(weights=torch.ones(len(s.y))), TYPE, ["must be 'topk' or None, got a tensor"], "combine"
    ),
    "combine_with_other_weights": Mistake(
        lambda s: s.combine(weights="softmax"), VALUE, ["must be 'topk' or None, got 'softmax'"], "combine"
    ),
    "combine_along_changed_weights": Mistake(
        combine_along_changed_weights, VALUE, ["topk_weights were changed in place", "version 0 was sent"], "combine"
    ),
    "combine_all_of_a_list": Mistake(
        lambda s: s.comm.combine_all([s.y.tolist()], s.handle), TYPE, ["y must be a tensor", "list"], "combine_all"
    ),
    "combine_all_of_one_tensor": Mistake(
        lambda s: s.comm.combine_all(s.y, s.handle),
        TYPE,
        ["combine_all takes a sequence of tensors, got Tensor"],
        "combine_all",
    ),
    "combine_all_of_nothing": Mistake(
        lambda s: s.comm.combine_all([], s.handle), VALUE, ["combine_all takes 1 to 8 tensors, got 0"], "combine_all"
    ),
    "dispatch_weights_of_a_list": Mistake(
        lambda s: s.comm.dispatch_weights(s.weights.tolist(), s.handle),
        TYPE,
        ["topk_weights", "list"],
        "dispatch_weights",
    ),
    "dispatch_weights_of_other_topk": Mistake(
        lambda s: s.comm.dispatch_weights(s.weights[:, 1:], s.handle),
        VALUE,
        ["topk_weights has shape (", ", 2), the handle's routing (", ", 3)"],
        "dispatch_weights",
    ),
    "dispatch_weights_of_wrong_dtype": Mistake(
        lambda s: s.comm.dispatch_weights(s.ids, s.handle),
        TYPE,
        ["topk_weights must be one of", "got torch.int64"],
        "dispatch_weights",
    ),
    "combine_along_the_result_of_dispatch": Mistake(
        lambda s: s.comm.combine(s.y, fusco.Dispatched((s.y,), s.ids, None, s.handle)),
        TYPE,
        ["handle must be the handle of a dispatch (sent.handle), got Dispatched"],
        "combine",
    ),
    "combine_weights_of_too_few_rows": Mistake(
        lambda s: s.comm.combine_weights(s.y[1:, 0], s.handle), VALUE, ["values must have shape ("], "combine_weights"
    ),
    "combine_weights_of_integers": Mistake(
        lambda s: s.comm.combine_weights(s.y[:, 0].long(), s.handle),
        TYPE,
        ["values must be of a floating-point dtype, got torch.int64"],
        "combine_weights",
    ),
    "combine_weights_along_no_handle": Mistake(
        lambda s: s.comm.combine_weights(s.y[:, 0], s.handle.plan), TYPE, ["handle", "Plan"], "combine_weights"
    ),
    "combine_weights_on_another_device": Mistake(
        lambda s: s.comm.combine_weights(s.y[:, 0].to(META), s.handle), VALUE, ["values is on meta"], "combine_weights"
    ),
    "fail_before_a_verb": Mistake(fail_before_a_verb, "LookupError", ["no such layer"], "shuffle"),
    "shuffle_with_an_unknown_rank": Mistake(
        lambda s: s.comm.shuffle({17: whole(torch.zeros(2))}, {}), VALUE, ["[17]", "4"], "shuffle"
    ),
    "shuffle_of_no_segments": Mistake(
        lambda s: s.comm.shuffle({0: torch.zeros(2)}, {}), TYPE, ["Segments", "Tensor"], "shuffle"
    ),
    "shuffle_of_no_mapping": Mistake(lambda s: s.comm.shuffle(None, {}), TYPE, ["mappings", "NoneType"], "shuffle"),
    "shuffle_without_receive": Mistake(lambda s: s.comm.shuffle({}, None), TYPE, ["mappings", "NoneType"], "shuffle"),
    "exchange_of_too_many_rows": Mistake(
        lambda s: s.comm.all_to_all(None, torch.ones(4, HIDDEN), [2**61] * 4),
        VALUE,
        ["output_split_sizes", "sum to 9223372036854775808, more rows than a tensor can have"],
        "all_to_all",
    ),
    "shuffle_with_a_broken_mapping": Mistake(
        lambda s: s.comm.shuffle(WithoutItems({0: whole(torch.zeros(2))}), {}),
        "LookupError",
        ["an item that is gone"],
        "shuffle",
    ),
    "shuffle_with_a_string": Mistake(
        lambda s: s.comm.shuffle({"a": whole(torch.zeros(2))}, {}),
        TYPE,
        ["ranks, which are integers, got 'a'"],
        "shuffle",
    ),
}

IN_TRANSFORM = ["dispatch was called inside a transform of torch.func"]
# Tensors without plain memory.
NOT_MOVABLE = {
    "quantised_rows": Mistake(lambda s: s.dispatch(quantised(s.x)), TYPE, ["payload 0 is quantised (torch.qint8)"]),
    "nested_rows": Mistake(
        lambda s: s.dispatch(torch.nested.nested_tensor([torch.ones(HIDDEN) for _ in s.x])),
        TYPE,
        ["payload 0 is a nested tensor"],
    ),
    "fake_rows": Mistake(lambda s: s.dispatch(FakeTensorMode().from_tensor(s.x)), TYPE, ["payload 0 is a FakeTensor"]),
    "freed_rows": Mistake(lambda s: s.dispatch(freed(s.x.clone())), TYPE, ["payload 0 has", "its storage has 0"]),
    "rows_of_a_mesh": Mistake(
        lambda s: s.dispatch(OfMesh(s.x, s.x)), TYPE, ["payload 0 is a OfMesh", "to_local() of a DTensor"]
    ),
    "fake_ids": Mistake(
        lambda s: s.dispatch(ids=FakeTensorMode().from_tensor(s.ids)), TYPE, ["topk_idx is a FakeTensor"]
    ),
    "rows_under_grad": Mistake(lambda s: torch.func.grad(lambda x: s.dispatch(x).rows.sum())(s.x), TYPE, IN_TRANSFORM),
    "plain_rows_under_grad": Mistake(
        lambda s: torch.func.grad(lambda x: (s.dispatch(), x.sum())[1])(s.x), TYPE, IN_TRANSFORM
    ),
    "rows_under_vmap": Mistake(lambda s: torch.func.vmap(lambda x: s.dispatch(x).rows)(s.x[None]), TYPE, IN_TRANSFORM),
    "rows_under_jvp": Mistake(
        lambda s: torch.func.jvp(lambda x: s.dispatch(x).rows, (s.x,), (s.x,)), TYPE, IN_TRANSFORM
    ),
    "rows_with_a_tangent": Mistake(rows_with_a_tangent, TYPE, ["payload 0 has a tangent"]),
    "rows_while_faking": Mistake(rows_while_faking, TYPE, ["dispatch was called while PyTorch traces"]),
    "y_under_grad": Mistake(
        lambda s: torch.func.grad(lambda y: s.combine(y).sum())(s.y),
        TYPE,
        ["combine was called inside a transform of torch.func"],
        "combine",
    ),
    "shuffle_of_freed_memory": Mistake(
        shuffle_of_freed_memory, TYPE, ["the base of segments for rank 0 has 8 bytes", "storage has 0"], "shuffle"
    ),
    "exchange_of_quantised_rows": Mistake(
        exchange_of_quantised_rows, TYPE, ["output is quantised (torch.qint8)"], "all_to_all"
    ),
}

MISMATCH = "MismatchError"  # on all ranks
MISMATCHES = {
    "dispatch_other_width": Mistake(
        lambda s: s.dispatch(s.wide(HIDDEN + 1)),
        MISMATCH,
        ["['float32[3]'] on ranks 0, 1, 3", "['float32[4]'] on rank 2"],
    ),
    "dispatch_other_dtype": Mistake(lambda s: s.dispatch(s.x.half()), MISMATCH, ["float32[3]", "float16[3]"]),
    "dispatch_other_num_topk": Mistake(
        lambda s: s.dispatch(ids=s.ids[:, 1:], weights=s.weights[:, 1:]),
        MISMATCH,
        ["num_topk is 3 on ranks 0, 1, 3, 2 on rank 2"],
    ),
    "dispatch_without_weights": Mistake(
        lambda s: s.dispatch(weights=None), MISMATCH, ["topk_weights", "none on rank 2"]
    ),
    "dispatch_other_weights": Mistake(
        lambda s: s.dispatch(weights=s.weights.double()), MISMATCH, ["topk_weights", "torch.float64 on rank 2"]
    ),
    "dispatch_with_gradients": Mistake(lambda s: s.dispatch(s.x.clone().requires_grad_()), MISMATCH, ["requires_grad"]),
    "dispatch_more_payloads": Mistake(lambda s: s.dispatch([s.x, s.x]), MISMATCH, ["payloads"]),
    "combine_other_dtype": Mistake(
        lambda s: s.combine(s.y.bfloat16()), MISMATCH, ["float32[3]", "bfloat16[3] on rank 2"], "combine"
    ),
    "combine_unweighted": Mistake(lambda s: s.combine(weights=None), MISMATCH, ["is_weighted"], "combine"),
    "combine_all_of_more_tensors": Mistake(
        lambda s: s.comm.combine_all([s.y, s.y], s.handle), MISMATCH, ["combine_all", "on rank 2"], "combine_all"
    ),
    "combine_while_others_dispatch": Mistake(
        GOOD["combine"], MISMATCH, ["different collectives", "dispatch on ranks 0, 1, 3", "combine on rank 2"]
    ),
    "dispatch_while_others_combine": Mistake(
        GOOD["dispatch"], MISMATCH, ["combine on ranks 0, 1, 3", "dispatch on rank 2"], "combine"
    ),
    "again_while_others_dispatch": Mistake(
        GOOD["dispatch_again"], MISMATCH, ["dispatch on ranks 0, 1, 3", "dispatch_again on rank 2"]
    ),
    "shuffle_while_others_combine": Mistake(GOOD["shuffle"], MISMATCH, ["shuffle on rank 2"], "combine"),
    "shuffle_to_all": Mistake(shuffle_to_all, MISMATCH, ["rank 2 sends 8 bytes to rank 0, which expects 0"], "shuffle"),
}

TOO_FEW_ROWS = Mistake(lambda s: s.dispatch(static=fusco.StaticRows(1)), "RowOverflowError", ["StaticRows(1)"])
MISTAKES = {**BAD_INPUTS, **NOT_MOVABLE, **MISMATCHES, "too_few_static_rows": TOO_FEW_ROWS}
