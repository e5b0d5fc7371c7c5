"""What the tests' functions on ranks share: communicators of all kinds, poisoned memory, comparisons bit for bit."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from on_device import OnDevice

import fusco
from generator import Case, number_of, values
from law import Law


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A communicator to be made on every rank."""

    ranks_per_node: int | None
    num_experts: int = 24
    num_topk: int = 8
    max_tokens: int = 24
    max_bytes_per_token: int = 256
    balancer: str = "send-and-receive"
    expert_placement: tuple[int, ...] | None = None
    device: str = "cpu"
    settings: fusco.Settings = field(default_factory=lambda: fusco.Settings(timeout_s=60.0, slice_bytes=1 << 16))

    def open(self, group: dist.ProcessGroup) -> fusco.Communicator:
        """Make it."""
        comm = fusco.Communicator(
            group,
            num_experts=self.num_experts,
            num_topk=self.num_topk,
            max_tokens_per_rank=self.max_tokens,
            max_bytes_per_token=self.max_bytes_per_token,
            expert_placement=self.expert_placement,
            ranks_per_node=self.ranks_per_node,
            balancer=fusco.BALANCERS[self.balancer],
            settings=self.settings,
            device=self.device,
        )
        return comm if self.device == "cpu" else OnDevice(comm)  # type: ignore[return-value]

    def case(self, kind: str, seed: int, world_size: int, num_topk: int | None = None) -> Case:
        """A routing that fits; of one to ``num_topk`` slots a token, unless told."""
        return Case(
            kind=kind,
            seed=seed,
            world_size=world_size,
            num_experts=self.num_experts,
            num_topk=num_topk or number_of(1, self.num_topk, seed, "topk"),
            max_tokens=self.max_tokens,
        )


def meet(group: dist.ProcessGroup) -> int:
    """Do nothing but be there."""
    return dist.get_rank(group)


def law_of(comm: fusco.Communicator, case: Case, alignment: int = 1) -> Law:
    """The law for a case on this communicator."""
    return Law(case.world_topk_idx, comm.placement.expert_to_rank, alignment)


def poison(*outputs: torch.Tensor) -> None:
    """Fill outputs with bytes that are NaN in every floating dtype: whoever gets their memory next must write it."""
    for output in outputs:
        output.detach().view(-1).view(torch.uint8).fill_(0xFF)


def poison_recycler(comm: fusco.Communicator, setup: Setup) -> None:
    """Poison as many outputs at once as the communicator keeps spares."""
    case = setup.case("one expert takes all", 0, comm.topology.world_size)
    x = torch.zeros(case.num_tokens(comm.rank), setup.max_bytes_per_token, dtype=torch.uint8)
    taken = [comm.dispatch(x, case.topk_idx(comm.rank)).rows for _ in range(4)]
    rows = values((len(taken[0]), setup.max_bytes_per_token // 8), torch.float64, "poison")
    taken += [comm.combine(rows, comm.dispatch(x, case.topk_idx(comm.rank)).handle) for _ in range(4)]
    poison(*taken)


def assert_same_bits(seen: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Same dtype, shape and bits: NaNs equal themselves."""
    assert seen.dtype == expected.dtype, f"{what}: {seen.dtype}, expected {expected.dtype}"
    assert seen.shape == expected.shape, f"{what}: shape {tuple(seen.shape)}, expected {tuple(expected.shape)}"
    seen_bytes, expected_bytes = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (seen, expected))
    if not torch.equal(seen_bytes, expected_bytes):
        rows = (seen_bytes != expected_bytes).view(len(seen), -1).any(dim=1).nonzero().squeeze(1).tolist()
        raise AssertionError(f"{what}: rows {rows} of {len(seen)} differ")


def assert_within(seen: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor, what: str) -> None:
    """Each element no further from the expected one than its bound."""
    assert seen.shape == expected.shape, f"{what}: shape {tuple(seen.shape)}, expected {tuple(expected.shape)}"
    error = (seen.double() - expected).abs()
    is_wrong = ~(error <= bound)  # a NaN is wrong, too
    if is_wrong.any():
        rows = is_wrong.any(dim=1).nonzero().squeeze(1).tolist()
        excess = (error / bound)[is_wrong].max()
        raise AssertionError(f"{what}: rows {rows} of {len(seen)} are off by up to {excess:.3g} times the bound")


def check_combine(
    comm: fusco.Communicator,
    law: Law,
    handle: fusco.Handle,
    weights: Sequence[torch.Tensor] | None,
    y: Sequence[torch.Tensor],
    wire_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Combine ``y[r]`` of all ranks and compare with the law."""
    out = comm.combine(y[comm.rank], handle)
    assert out.dtype == y[comm.rank].dtype
    sums = law.sums(comm.rank, y, weights, comm.topology.rank_to_node)
    assert_within(out, sums.exact, law.error_bound(sums, out.dtype, wire_dtype), "combine")
    return out


def world_rows(law: Law, hidden: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Expert-major rows of every rank, as experts might give them. Padding is NaN: combine must not look at it."""
    world = []
    for rank in law.ranks:
        slots = law.slots(rank)
        rows = values((len(slots), hidden), dtype, seed, "y", rank)
        rows[[slot for slot, pair in enumerate(slots) if pair is None]] = float("nan")
        world.append(rows)
    return world


def digest(*tensors: torch.Tensor) -> str:
    """A fingerprint of the bits of tensors."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def dawdle(rank: int, seed: int, longest_ms: int) -> None:
    """Sleep a little, or not, each rank for another time."""
    time.sleep(max(0, number_of(-longest_ms, longest_ms, seed, "pause", rank)) / 1000)
