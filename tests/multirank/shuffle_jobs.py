"""Functions on ranks: scattered segments of all sizes, among all ranks or between two."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from mistake_jobs import Outcome, attempt, check_that_it_works
from rank_setup import Setup, pause_randomly

import fusco
from comparison import assert_same_bits
from generator import any_bits, number_of, random_of

GAP_BYTES = 3


@dataclass(frozen=True)
class Payload:
    """Segments of random memory, and the bytes in them in order."""

    segments: fusco.Segments

    @property
    def stream(self) -> torch.Tensor:
        offsets, sizes = self.segments.offset_bytes.tolist(), self.segments.num_bytes.tolist()
        pieces = [self.segments.memory[o : o + size] for o, size in zip(offsets, sizes, strict=True)]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def scattered(total_bytes: int, largest: int, dtype: torch.dtype, *what: int | str) -> Payload:
    """Return ``total_bytes`` in segments of unequal sizes, some empty, in any order and with gaps between them."""
    sizes = []
    while sum(sizes) < total_bytes or not sizes:
        sizes.append(min(number_of(0, largest, *what, "size", len(sizes)), total_bytes - sum(sizes)))
        if not total_bytes:
            break
    order = torch.randperm(len(sizes), generator=random_of(*what, "order"))
    num_bytes = torch.tensor(sizes)
    ends = (num_bytes[order] + GAP_BYTES).cumsum(0)
    offsets = torch.empty_like(num_bytes)
    offsets[order] = ends - num_bytes[order]
    num_elements = -(-(int(ends[-1]) + GAP_BYTES) // dtype.itemsize)
    return Payload(fusco.Segments(any_bits((num_elements,), dtype, *what, "memory"), offsets, num_bytes))


def check_arrival(received: Payload, before: torch.Tensor, stream: torch.Tensor, what: str) -> None:
    """Assert that the segments contain the stream, and that nothing else has changed."""
    assert_same_bits(received.stream, stream, what)
    offsets, sizes = received.segments.offset_bytes.tolist(), received.segments.num_bytes.tolist()
    is_gap = torch.ones(len(before), dtype=torch.bool)
    for offset, size in zip(offsets, sizes, strict=True):
        is_gap[offset : offset + size] = False
    assert_same_bits(received.segments.memory[is_gap], before[is_gap], f"{what}, between the segments")


def check_shuffles(
    group: dist.ProcessGroup, setup: Setup, sizes: Sequence[int], largest: int, longest_pause_ms: int = 0
) -> int:
    """Shuffle three times, each pair of ranks with one of ``sizes``; return the bytes sent to other nodes."""
    num_sent = 0
    with setup.open(group) as comm:
        nodes, rank, everyone = comm.topology.rank_to_node, comm.rank, range(comm.topology.world_size)
        for seed in range(3):
            totals = {(s, d): sizes[number_of(0, len(sizes) - 1, seed, s, d)] for s in everyone for d in everyone}

            def sent(src, dst, seed=seed, totals=totals):
                dtype = (torch.uint8, torch.float32, torch.int16)[seed]
                return scattered(totals[src, dst], largest, dtype, seed, "send", src, dst)

            send = {dst: sent(rank, dst) for dst in everyone if totals[rank, dst] or dst % 2}
            receive = {
                src: scattered(totals[src, rank], largest // 2 + 1, torch.uint8, seed, "receive", src, rank)
                for src in everyone
                if totals[src, rank] or src % 2
            }
            before = {src: payload.segments.memory.clone() for src, payload in receive.items()}
            pause_randomly(rank, seed, longest_pause_ms)
            comm.shuffle(*({peer: p.segments for peer, p in part.items()} for part in (send, receive)))
            for src, payload in receive.items():
                check_arrival(payload, before[src], sent(src, rank).stream, f"from rank {src}")
            for dst, payload in send.items():
                assert_same_bits(payload.stream, sent(rank, dst).stream, "what was sent")
            num_sent += sum(total for (s, d), total in totals.items() if s == rank and nodes[d] != nodes[s])
    return num_sent


def check_pairs(group: dist.ProcessGroup, setup: Setup, sizes: Sequence[int], largest: int) -> None:
    """``gather_send`` and ``scatter_recv`` between every two ranks, in both directions, with some dispatches."""
    with setup.open(group) as comm:
        everyone = range(comm.topology.world_size)
        pairs = [(src, dst) for src in everyone for dst in everyone if src != dst]
        for seed, total in enumerate(sizes):
            for src, dst in pairs:
                sent = scattered(total, largest, torch.float16, seed, "send", src, dst)
                if comm.rank == src:
                    comm.gather_send(sent.segments, dst)
                elif comm.rank == dst:
                    received = scattered(total, largest, torch.uint8, seed, "receive", src, dst)
                    before = received.segments.memory.clone()
                    comm.scatter_recv(received.segments, src)
                    check_arrival(received, before, sent.stream, f"from rank {src}")
            check_that_it_works(comm, setup)


def send_mismatched(group: dist.ProcessGroup, setup: Setup, src: int, dst: int) -> Outcome:
    """Send with different sizes on two ranks; afterwards they send correctly, and all dispatch."""
    with setup.open(group) as comm:
        payload = scattered(100 if comm.rank == src else 101, 40, torch.uint8, comm.rank)
        before = payload.segments.memory.clone()
        outcome = Outcome("", "", 0.0)
        if comm.rank == src:
            outcome = attempt(lambda: comm.gather_send(payload.segments, dst))
        elif comm.rank == dst:
            outcome = attempt(lambda: comm.scatter_recv(payload.segments, src))
        assert_same_bits(payload.segments.memory, before, "memory after a mismatch")
        if comm.rank == src:
            comm.gather_send(scattered(50, 9, torch.uint8, "good").segments, dst)
        elif comm.rank == dst:
            received = scattered(50, 20, torch.uint8, "place")
            comm.scatter_recv(received.segments, src)
            assert_same_bits(received.stream, scattered(50, 9, torch.uint8, "good").stream, "after a mismatch")
        check_that_it_works(comm, setup)
    return outcome


def move_the_same_way(group: dist.ProcessGroup, setup: Setup) -> list[Outcome]:
    """Both ranks send, then both receive, each time as many bytes; then one of them sends to the other."""
    with setup.open(group) as comm:
        payload, other = scattered(100, 40, torch.uint8, comm.rank), 1 - comm.rank
        before = payload.segments.memory.clone()
        verbs = (comm.gather_send, comm.scatter_recv)
        outcomes = [attempt(lambda verb=verb: verb(payload.segments, other)) for verb in verbs]
        assert_same_bits(payload.segments.memory, before, "memory after two calls in the same direction")
        if comm.rank:
            comm.gather_send(scattered(100, 9, torch.uint8, "good").segments, other)
        else:
            comm.scatter_recv(payload.segments, other)
            assert_same_bits(payload.stream, scattered(100, 9, torch.uint8, "good").stream, "afterwards")
        check_that_it_works(comm, setup)
    return outcomes


def shuffle_mismatched(group: dist.ProcessGroup, setup: Setup) -> tuple[Outcome, bool]:
    """Shuffle one byte more from rank 0 than rank 1 expects; also return True if no memory has changed."""
    with setup.open(group) as comm:
        everyone = range(comm.topology.world_size)
        send = {dst: scattered(10 + (comm.rank == 0 and dst == 1), 5, torch.uint8, dst).segments for dst in everyone}
        receive = {src: scattered(10, 5, torch.uint8, src).segments for src in everyone}
        before = [segments.memory.clone() for segments in receive.values()]
        outcome = attempt(lambda: comm.shuffle(send, receive))
        is_untouched = all(torch.equal(s.memory, b) for s, b in zip(receive.values(), before, strict=True))
        check_that_it_works(comm, setup)
    return outcome, is_untouched


def name_wrong_peers(group: dist.ProcessGroup, setup: Setup) -> list[Outcome]:
    """Name peers that are no other rank, and payloads that are no segments; no rank waits."""
    with setup.open(group) as comm:
        payload = scattered(4, 4, torch.uint8, "payload").segments
        other = (comm.rank + 1) % comm.topology.world_size
        outcomes = [
            attempt(lambda: comm.gather_send(payload, comm.rank)),
            attempt(lambda: comm.scatter_recv(payload, comm.rank)),
            attempt(lambda: comm.gather_send(payload, comm.topology.world_size)),
            attempt(lambda: comm.scatter_recv(payload, -1)),
            attempt(lambda: comm.gather_send(torch.zeros(4), other)),  # type: ignore[arg-type]
            attempt(lambda: comm.scatter_recv(None, other)),  # type: ignore[arg-type]
            attempt(lambda: comm.gather_send(payload, None)),  # type: ignore[arg-type]
            attempt(lambda: comm.scatter_recv(payload, "1")),  # type: ignore[arg-type]
        ]
        check_that_it_works(comm, setup)
    return outcomes


def overlap_senders(group: dist.ProcessGroup, setup: Setup) -> None:
    """Send from all ranks to rank 0 at once, which receives in the opposite order."""
    with setup.open(group) as comm:
        senders = range(1, comm.topology.world_size)
        if comm.rank:
            comm.gather_send(scattered(3000, 500, torch.uint8, comm.rank).segments, 0)
        else:
            time.sleep(0.05)
            for src in reversed(senders):
                received = scattered(3000, 700, torch.uint8, "place", src)
                comm.scatter_recv(received.segments, src)
                assert_same_bits(received.stream, scattered(3000, 500, torch.uint8, src).stream, f"from rank {src}")
        check_that_it_works(comm, setup)


def bytes_sent_for_one_rank(group: dist.ProcessGroup, setup: Setup, num_bytes: int) -> int:
    """Shuffle: rank 0 sends to ranks of the other node, and itself; return the bytes that this rank sent to nodes."""
    with setup.open(group) as comm:
        totals = {(0, 0): 500, (0, 2): num_bytes, (0, 3): num_bytes, (1, 0): 700}
        payloads = {pair: scattered(total, 900, torch.int16, "send", *pair) for pair, total in totals.items()}
        received = {pair: scattered(total, 300, torch.uint8, "receive", *pair) for pair, total in totals.items()}
        before = {pair: payload.segments.memory.clone() for pair, payload in received.items()}
        send = {dst: payloads[src, dst].segments for src, dst in totals if src == comm.rank}
        receive = {src: received[src, dst].segments for src, dst in totals if dst == comm.rank}
        comm.shuffle(send, receive)
        for src in receive:
            pair = (src, comm.rank)
            check_arrival(received[pair], before[pair], payloads[pair].stream, f"from rank {src}")
        return comm.profile.internode_row_bytes


def reads_of_overwritten_memory(group: dist.ProcessGroup, setup: Setup) -> list[str]:
    """Errors of backward passes that need what a verb has overwritten since: for each verb that writes."""
    errors = []
    with setup.open(group) as comm:
        peer, of_all = comm.rank ^ 1, comm.topology.world_size

        def whole(tensor: torch.Tensor) -> fusco.Segments:
            return fusco.Segments(tensor, torch.tensor([0]), torch.tensor([tensor.nbytes]))

        def between_two(written: torch.Tensor) -> None:
            for is_sender in (comm.rank < peer, comm.rank > peer):
                if is_sender:
                    comm.gather_send(whole(torch.ones(of_all)), peer)
                else:
                    comm.scatter_recv(whole(written), peer)

        for verb in (
            lambda written: comm.all_to_all(written, torch.ones(of_all)),
            lambda written: comm.shuffle({peer: whole(torch.ones(of_all))}, {peer: whole(written)}),
            between_two,
        ):
            weight, written = torch.ones(of_all, requires_grad=True), torch.zeros(of_all)
            product = weight * written
            verb(written)
            assert written.tolist() == [1.0] * of_all
            errors.append(attempt(product.sum().backward).text)
            with torch.inference_mode():
                verb(torch.zeros(of_all))
    return errors
