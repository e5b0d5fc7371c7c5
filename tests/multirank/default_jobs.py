"""Functions on ranks: every collective while PyTorch's defaults for new tensors are changed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from rank_setup import digest

import fusco

ON_CPU = torch.device("cpu")


@contextmanager
def defaults(device: str | None, dtype: torch.dtype) -> Iterator[None]:
    """Change the defaults for new tensors."""
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


def run_moe_layer(group: dist.ProcessGroup, device: str | None, dtype: torch.dtype) -> list[str]:
    """Run the layer of ``examples/moe_layer.py`` with gradients of weights; return digests of its outputs."""
    with defaults(device, dtype):
        generator = torch.Generator(ON_CPU).manual_seed(dist.get_rank(group))
        x = torch.randn(48, 24, dtype=torch.bfloat16, device=ON_CPU, generator=generator).requires_grad_()
        scores = torch.randn(48, 8, dtype=torch.float32, device=ON_CPU, generator=generator)
        topk_weights, topk_idx = scores.softmax(1).topk(3)
        topk_weights.requires_grad_()
        with fusco.Communicator(
            group, num_experts=8, num_topk=3, max_tokens_per_rank=48, max_bytes_per_token=64, ranks_per_node=2
        ) as comm:
            sent = comm.dispatch(x, topk_idx, topk_weights, with_weights=True)
            blocks = sent.rows.split(sent.num_rows_per_expert.tolist())
            y = torch.cat([block * (1 + expert) for expert, block in enumerate(blocks)])
            out = comm.combine(y, sent.handle)
            (out.float().sum() + sent.weights.square().sum()).backward()
            again = comm.dispatch_again(x.detach(), sent.handle)
        return [digest(value) for value in (sent.rows, sent.weights, out, *again, x.grad, topk_weights.grad)]


def run_byte_collectives(group: dist.ProcessGroup, device: str | None, dtype: torch.dtype) -> list[str]:
    """Run ``all_to_all``, ``shuffle``, ``gather_send``, ``scatter_recv`` and ``empty``; return digests of outputs."""
    with defaults(device, dtype):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        source = torch.arange(6 * size, dtype=torch.int32, device=ON_CPU) + 1000 * rank
        output, shuffled, streamed = (torch.zeros_like(source) for _ in range(3))
        offsets = torch.tensor([0, 16], dtype=torch.int64, device=ON_CPU)
        sizes = torch.tensor([8, 3], dtype=torch.int64, device=ON_CPU)
        with fusco.Communicator(
            group, num_experts=size, num_topk=1, max_tokens_per_rank=8, max_bytes_per_token=64, ranks_per_node=2
        ) as comm:
            comm.all_to_all(output, source)
            following, leading = (rank + 1) % size, (rank - 1) % size
            comm.shuffle(
                {following: fusco.Segments(source, offsets, sizes)}, {leading: fusco.Segments(shuffled, offsets, sizes)}
            )
            if rank % 2:
                comm.gather_send(fusco.Segments(source, offsets, sizes), following)
            else:
                comm.scatter_recv(fusco.Segments(streamed, offsets, sizes), leading)
            rows = torch.full((4, 3), float(rank), dtype=torch.float32, device=ON_CPU)
            moved = comm.dispatch(rows, torch.full((4, 1), following, device=ON_CPU)).rows
        return [digest(value) for value in (output, shuffled, streamed, moved)]


def describe(group: dist.ProcessGroup) -> tuple[list[str], list[str]]:
    """Return the texts of a communicator sized by ``hidden``, of its results, and what it logs."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fusco")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    comm = fusco.Communicator(
        group, num_experts=8, num_topk=2, max_tokens_per_rank=4, hidden=6, ranks_per_node=2, balancer="static"
    )
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    with comm:
        rows = torch.ones((4, 6), dtype=torch.bfloat16, device=ON_CPU)
        sent = comm.dispatch(rows, torch.tensor([[0, 5]] * 4, dtype=torch.int64, device=ON_CPU))
        texts = [repr(comm), repr(sent), repr(sent.handle)]
    return [*texts, repr(comm)], records
