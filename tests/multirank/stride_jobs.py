"""Functions on ranks: tensors of no element or one, which are contiguous with any strides."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rank_setup import Setup

import fusco


def column(num_rows: int, value: float) -> torch.Tensor:
    """The first rows of a column of a matrix."""
    return torch.full((4, 3), value)[:num_rows, 0]


def dispatch_columns(group: dist.ProcessGroup, setup: Setup, num_rows: int) -> list[list[float]]:
    """Dispatch ``num_rows`` tokens from rank 1 to rank 0, with a column as scales; rank 0 has one token."""
    with setup.open(group) as comm:
        n = num_rows if comm.rank == 1 else 1
        ids, scales = torch.zeros(n, 1, dtype=torch.int64), column(n, comm.rank + 1.0)
        sent = comm.dispatch([torch.ones(n, 2), scales], ids)
        return [sent.payloads[1].tolist(), comm.dispatch_again(scales, sent.handle)[0].tolist()]


def combine_with_gradients(group: dist.ProcessGroup, setup: Setup) -> list[float]:
    """Combine one token per rank, of one value; its gradients are one expanded value."""
    with setup.open(group) as comm:
        x = torch.full((4, 3), 2.0)[:1, 1:2].requires_grad_()
        weights = torch.ones(3, 4)[:1, :1].requires_grad_()
        sent = comm.dispatch(x, torch.tensor([[1 - comm.rank]]), weights)
        rows = sent.rows.detach().expand(1, 2)[:, :1].requires_grad_()
        out = comm.combine(rows, sent.handle)
        out.backward(torch.ones(()).expand(1, 1))
        sent.rows.backward(torch.full((), 3.0).expand(1, 1))
        return [out.item(), rows.grad.item(), weights.grad.item(), x.grad.item()]


def move_bytes(group: dist.ProcessGroup, setup: Setup) -> list[list[float]]:
    """Send a row from rank 0 to rank 1 by ``all_to_all``, and an element by ``shuffle`` and by ``gather_send``."""
    with setup.open(group) as comm:
        everything = torch.tensor([0]), torch.tensor([4])
        outputs = []
        splits = ([0, 0], [0, 1]) if comm.rank == 0 else ([1, 0], [0, 0])
        source, target = column(1 - comm.rank, 7.0), column(comm.rank, 0.0)
        comm.all_to_all(target, source, *splits)
        outputs.append(target.tolist())
        target = column(1, 0.0)
        if comm.rank == 0:
            comm.shuffle({1: fusco.Segments(column(1, 8.0), *everything)}, {})
            comm.gather_send(fusco.Segments(column(1, 9.0), *everything), 1)
        else:
            comm.shuffle({}, {0: fusco.Segments(target, *everything)})
            outputs.append(target.tolist())
            comm.scatter_recv(fusco.Segments(target, *everything), 0)
            outputs.append(target.tolist())
        return outputs
