"""The kernels that choose owners and move experts, by their twins; see ``simulated_kernels``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from simulated_device import Stream

from fusco import ExpertPlacement, Topology
from fusco.api.owners import _quotas as quotas_of
from fusco.core.rows import accumulation_dtype
from fusco.cpu.kernels.choose_owners import choose_owners, count_experts
from fusco.cuda.kernels.abi import ELEMENT_TYPES
from fusco.placement import Balance, plan_batch
from fusco.planner.owners import OwnerTables

_IDS = {4: torch.int32, 8: torch.int64}
_ELEMENTS = {name: dtype for dtype, name in ELEMENT_TYPES.items()}


class OwnerKernels:
    """Mixed into ``SimulatedKernel``."""

    _at: Any
    _words: Any
    _constants: Mapping[str, Any]

    def _ids(self, args: Any) -> torch.Tensor:
        return self._at(args.topk_idx, _IDS[self._constants["ID_BYTES"]], (args.num_pairs, 1))

    def _share_counts(self, stream: Stream, args: Any) -> None:
        words, rank, num_ranks = self._words, args.comm.rank, self._constants["NUM_RANKS"]
        shape = (2, num_ranks, args.num_experts)
        epoch = [0]

        def send() -> None:
            epoch[0] = words.counts[rank] + 1
            for arena in args.comm.arena:
                there = self._at(arena + args.arrived, torch.int32, shape)
                there[epoch[0] % 2, rank] = torch.from_numpy(count_experts(self._ids(args), args.num_experts))
            words.counts[rank] = epoch[0]

        def receive() -> None:
            here = self._at(args.comm.arena[rank] + args.arrived, torch.int32, shape)[epoch[0] % 2]
            for src, number in zip(args.ranks, here, strict=True):
                self._at(args.counts + 4 * src * args.num_experts, torch.int32, (args.num_experts,)).copy_(number)

        stream.launch("sending counts", send)
        stream.launch("receiving counts", receive, lambda: min(words.counts) >= epoch[0])

    def _exchange_rows(self, stream: Stream, args: Any) -> None:
        """Runs travel whole, by ``words.runs``: number of the launch, source and destination."""
        words, rank, ranks, number = self._words, args.comm.rank, range(self._constants["NUM_RANKS"]), [0]
        of_input, of_output = ([0, *ends] for ends in (args.input_ends, args.output_ends))

        def send() -> None:
            number[0] = words.exchanges[rank] + 1
            for dst in ranks:
                run = self._at(args.input + of_input[dst], torch.uint8, (of_input[dst + 1] - of_input[dst],))
                words.runs[number[0], rank, dst] = run.clone()
            words.exchanges[rank] = number[0]

        def receive() -> None:
            for src in ranks:
                run = words.runs.pop((number[0], src, rank))
                self._at(args.output + of_output[src], torch.uint8, (of_output[src + 1] - of_output[src],)).copy_(run)

        stream.launch("sending rows", send)
        stream.launch("receiving rows", receive, lambda: min(words.exchanges) >= number[0])

    def _copy_experts(self, stream: Stream, args: Any) -> None:
        """Experts travel whole, by ``words.parcels``: number of the launch, home, rank and place of the copy."""
        words, rank, is_sum = self._words, args.comm.rank, bool(self._constants["IS_SUM"])
        number = [0]

        def send() -> None:
            number[0] = words.copies[rank] + 1
            for home, local, to, place in self._copies(args):
                if rank == (to if is_sum else home):
                    at = self._rows_at(args, "source", place if is_sum else local)
                    words.parcels[number[0], home, to, place] = [row.clone() for row in at]
            words.copies[rank] = number[0]

        def receive() -> None:
            for place in range(0 if is_sum else args.spare_places):
                for row in self._rows_at(args, "target", place):
                    row.zero_()
            for home, local, to, place in self._copies(args):
                if rank == (home if is_sum else to):
                    at = self._rows_at(args, "target", local if is_sum else place)
                    for row, sent in zip(at, words.parcels[number[0], home, to, place], strict=True):
                        row.add_(sent) if is_sum else row.copy_(sent)

        stream.launch("sending experts", send)
        stream.launch("receiving experts", receive, lambda: min(words.copies) >= number[0])

    def _copies(self, args: Any) -> list[tuple[int, int, int, int]]:
        """Home, its local expert, rank and place of each copy, in ascending order of rank."""
        num_copies = int(self._at(args.plan, torch.int32, (1,)))
        listed = self._at(args.plan + 4 * (2 + args.num_experts), torch.int32, (num_copies, 3)).tolist()
        homes = self._at(args.homes, torch.int32, (args.num_experts,)).tolist()
        ranks = [rank for _, rank, _ in listed]
        found = [
            (*divmod(homes[expert], args.places_per_rank), rank, ranks[:i].count(rank))
            for i, (expert, rank, _) in enumerate(listed)
        ]
        return sorted(found, key=lambda copy: copy[2])

    def _rows_at(self, args: Any, end: str, place: int) -> list[torch.Tensor]:
        """A place of all tensors of the source or the target, in the dtype in which they are copied or added."""
        is_sum = self._constants["IS_SUM"]
        dtype = _ELEMENTS[self._constants["ELEMENT"]] if is_sum else torch.uint8
        of_end = accumulation_dtype(dtype) if is_sum and end == "target" else dtype
        found = []
        for each in args.tensors:
            address = getattr(each, end) + place * getattr(each, f"{end}_pitch")
            found.append(self._at(address, of_end, (each.num_bytes // dtype.itemsize,)))
        return found

    def _divide_rows(self, stream: Stream, args: Any) -> None:
        def divide() -> None:
            tables = self._tables(args, self._at(args.divided, torch.int32, (args.max_divided,)))
            counts = self._at(args.counts, torch.int32, (args.num_ranks, args.num_experts)).numpy()
            quotas = self._at(args.quotas, torch.int32, (len(tables.owner_to_rank),)).numpy().astype(np.int64)
            bounds = tables.divide_rows(counts[:, tables.divided], None if args.units else quotas)
            self._at(args.bounds, torch.int32, (len(bounds),)).copy_(torch.from_numpy(bounds))

        stream.launch("dividing rows", divide)

    def _plan_batch(self, stream: Stream, args: Any) -> None:
        def plan() -> None:
            experts, ranks, size = args.num_experts, args.num_ranks, args.num_ranks * args.places_per_rank
            counts = self._at(args.counts, torch.int32, (ranks, experts)).sum(0, dtype=torch.int32)
            homes = self._at(args.homes, torch.int32, (experts,)).numpy()
            balance = Balance(args.spare_places, args.aim_over_mean - 1, args.rows_per_copy)
            made = plan_batch(counts, homes // args.places_per_rank, ranks, balance, args.ranks_per_node)
            num_copies = len(made.experts)
            self._at(args.header, torch.int32, (2,)).copy_(torch.tensor([num_copies, made.limit != "places"]))
            self._at(args.rows_per_expert, torch.int32, (experts,)).copy_(counts)
            copies = np.stack([made.experts, made.ranks, made.rows], axis=1)
            self._at(args.copies, torch.int32, (num_copies, 3)).copy_(torch.from_numpy(copies))
            places = np.full(size, -1)
            places[homes] = np.arange(experts)
            placement = ExpertPlacement.replicated(places.reshape(ranks, -1).tolist(), num_experts=experts)
            tables = OwnerTables.of(placement, 0, Topology((0,) * ranks), (made.experts, made.ranks))
            values = {name: getattr(tables, name) for name in ("expert_to_first", "owners", "owner_to_rank")}
            values |= {"quotas": quotas_of(made, tables), "expert_to_divided": tables.expert_to_divided}
            values["divided"] = np.append(tables.divided, [-1] * (args.max_divided - len(tables.divided)))
            for name, table in values.items():
                there = self._at(getattr(args, name), torch.int32, (len(table),))
                there.copy_(torch.from_numpy(np.ascontiguousarray(table)))

        stream.launch("planning a batch", plan)

    def _choose_owners(self, stream: Stream, args: Any) -> None:
        def choose() -> None:
            to_divided = self._at(args.expert_to_divided, torch.int32, (args.num_experts,))
            tables = self._tables(args, to_divided)
            ids, size = self._ids(args), (len(tables.owners),)
            bounds = self._at(args.bounds, torch.int32, size).numpy() if args.bounds else None
            self._at(args.chosen, ids.dtype, ids.shape).copy_(choose_owners(ids, tables, bounds))

        stream.launch("choosing owners", choose)

    def _tables(self, args: Any, divided: torch.Tensor) -> OwnerTables:
        """Tables of a kernel; ``divided`` are the experts with several owners, or their indices by expert."""
        first = self._at(args.expert_to_first, torch.int32, (args.num_experts + 1,)).numpy()
        size, is_by_expert = (int(first[-1]),), hasattr(args, "owners")
        of_divided = divided.numpy()[divided.numpy() >= 0]
        to_divided = np.full(args.num_experts, -1, np.int32)
        to_divided[of_divided] = np.arange(len(of_divided))

        def table(name: str, length: tuple[int, ...]) -> np.ndarray:
            there = getattr(args, name, 0)
            return self._at(there, torch.int32, length).numpy() if there else np.zeros(0, np.int32)

        return OwnerTables(
            rank=args.rank,
            num_experts=args.num_experts,
            num_physical=getattr(args, "num_physical", 0),
            expert_to_first=first,
            owners=table("owners", size) if is_by_expert else np.zeros(size, np.int32),
            expert_to_divided=divided.numpy() if is_by_expert else to_divided,
            units=table("units", size).astype(np.int64),
            owner_to_rank=table("owner_to_rank", size).astype(np.int64),
            rank_to_node=table("rank_to_node", (getattr(args, "num_ranks", 0),)).astype(np.int64),
        )
