"""Verbs without experts: shuffle, all_to_all, gather_send, scatter_recv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

import torch

from fusco.api.autograd import ExchangeRows, Precomputed
from fusco.api.collective import run_collective
from fusco.api.elastic import Elastic
from fusco.api.uncompiled import limited
from fusco.core.rows import count_as_changed, wants_grad
from fusco.core.segments import Segments
from fusco.core.topology import ScheduleMode


class Exchanges(Elastic):
    """The verbs of a ``Communicator`` that exchange segments of bytes, or rows, as the caller lays them out."""

    @limited
    def shuffle(
        self, send: Mapping[int, Segments], receive: Mapping[int, Segments], *, timeout_s: float | None = None
    ) -> None:
        """Exchange scattered segments of any sizes among all ranks, without any MoE.

        Args:
            send: segments to send to each rank; ranks left out get nothing.
            receive: segments to write the bytes of each rank to, as many as that rank sends. Segments must overlap
                neither each other nor those to send. That is not checked, and the bytes are undefined then.
        """
        validate = partial(self._validator.validate_shuffle, send, receive)
        run_collective(self._session, self._engine, "shuffle", validate, self._engine.prepare_shuffle)
        for segments in receive.values():
            count_as_changed(segments.base)

    @limited
    def all_to_all(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,  # noqa: A002  the names are those of torch.distributed.all_to_all_single
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        schedule: ScheduleMode | None = None,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Exchange rows among all ranks, as ``torch.distributed.all_to_all_single``; skew between nodes is evened out.

        Ranks of a node first even out the bytes for each other node. Then nodes exchange in one-to-one stages. Ranks
        redistribute what arrived within the node while the next stage runs. In addition to the rings, a call takes
        memory for the bytes that this rank carries for others of its node: at most about its share of what the node
        sends and receives, and none with one node or with nodes of one rank. It returns when the output is
        complete and the input may change; on CUDA both hold for later launches. There is no ``async_op``, as the
        calling thread moves the rows itself. To overlap on CUDA, call it on another stream; on the CPU, from another
        thread, on a communicator that only this thread uses. The first call compiles the scheduler: seconds, once on
        each machine, or beforehand by ``fusco.schedule.warm_up``.

        With ``output=None`` the result is a new tensor through which gradients of any order flow. The backward pass is
        an exchange in the other direction, by the same kind of schedule, in which all ranks take part.

        Args:
            output: contiguous rows (num_rows, ...) of any dtype, to be written in order of source rank. It must not
                overlap ``input``, and no gradients flow through it. ``None`` makes a new one with the rows that
                ``output_split_sizes`` add up to, or with as many as ``input`` has.
            input: rows of the same dtype and shape, in order of destination rank; copied first unless contiguous. Both
                have at most 6 dimensions.
            output_split_sizes: number of rows from each rank; ``None`` means an equal number.
            input_split_sizes: number of rows to each rank; ``None`` means an equal number.
            schedule: mode of the schedule between nodes (see ``fusco.schedule.make_schedule``), the same on all ranks;
                ``None`` chooses between ``"exact"`` and ``"few"`` by ``fusco.schedule.choose_mode``.

        Returns:
            ``output``, or the new one.

        Raises:
            TypeError, ValueError: for this rank's bad arguments; RejectedInputError: for another rank's.
            MismatchError: on all ranks, before anything is sent, if a rank expects other numbers of rows than are sent
                to it, or if ranks differ in row, schedule, or in requiring gradients of the input.
            PeerFailureError: as in every collective; the output is undefined then.

        Source: FAST (Lei et al., NSDI 2026), section 4.3.
        """
        splits = (output_split_sizes, input_split_sizes)
        validate = partial(self._validator.validate_all_to_all, output, input, splits, schedule)
        request = run_collective(self._session, self._engine, "all_to_all", validate, self._engine.prepare_all_to_all)
        if output is not None:
            count_as_changed(output)
        if output is not None or not wants_grad(input):
            return request.output

        of_group = self._validator.rows_of_group
        sent, received = of_group(request.send_rows), of_group(request.receive_rows)

        def way_back(grad: torch.Tensor) -> torch.Tensor:
            return self.all_to_all(None, grad, sent, received, schedule=schedule)

        return cast("torch.Tensor", ExchangeRows.apply(input, Precomputed(request.output), way_back))  # type: ignore[no-untyped-call]

    @limited
    def gather_send(self, segments: Segments, dst: int, *, timeout_s: float | None = None) -> None:
        """Read scattered segments, in order, and send them to rank ``dst``, which calls ``scatter_recv``.

        It returns when ``dst`` has received everything. Raises ``ValueError`` unless ``dst`` is another rank of the
        group, ``MismatchError`` on both ranks if ``dst`` expects another number of bytes, and ``PeerFailureError`` if
        ``dst`` does not arrive within the limit.
        """
        with self._session.access.using("gather_send"):
            self._validator.validate_segments("gather_send", segments, dst)
            with self._session.point_to_point(name := f"gather_send to rank {dst}"):
                self._engine.stream(name, {self._validator.number_to_rank[dst]: segments}, {})

    @limited
    def scatter_recv(self, segments: Segments, src: int, *, timeout_s: float | None = None) -> None:
        """Receive from rank ``src``, which calls ``gather_send``, and write to scattered segments, in order.

        Raises the errors of ``gather_send``.
        """
        with self._session.access.using("scatter_recv"):
            self._validator.validate_segments("scatter_recv", segments, src)
            with self._session.point_to_point(name := f"scatter_recv from rank {src}"):
                self._engine.stream(name, {}, {self._validator.number_to_rank[src]: segments})
        count_as_changed(segments.base)
