"""Launcher of a communicator's kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from fusco.cuda.kernels.abi import MAX_PARTS
from fusco.cuda.kernels.library import Library


@dataclass(frozen=True)
class Launcher:
    """Launches kernels of a device for one rank.

    Attributes:
        library: the device's kernels.
        comm: a ``comm_type`` struct, the argument of kernels that work across the node's ranks.
        stream: the handle of the stream to launch on.

    """

    library: Library
    comm: ctypes.Structure
    stream: int

    @property
    def num_ranks(self) -> int:
        """Ranks of the node."""
        return len(self.comm.arena)

    def sms(self, num_sms: int | None) -> int:
        """Return ``num_sms``, or the device's number of SMs if that is fewer or ``num_sms`` is not given."""
        return min(num_sms or self.library.num_sms, self.library.num_sms)

    def launch(
        self,
        name: str,
        constants: Mapping[str, object],
        arguments: ctypes.Structure,
        *,
        grid: int,
        num_threads: int,
        shared_bytes: int = 0,
        is_dependent: bool = False,
    ) -> None:
        """See ``Kernel.launch``; the constants of all kernels are added to ``constants``."""
        always: dict[str, object] = {
            "ARGUMENT_BYTES": ctypes.sizeof(arguments),
            "NUM_RANKS": self.num_ranks,
            "NUM_THREADS": num_threads,
            "MAX_PARTS": MAX_PARTS,
        }
        kernel = self.library.get(name, always | dict(constants))
        kernel.launch(
            arguments,
            self.stream,
            grid=grid,
            num_threads=num_threads,
            shared_bytes=shared_bytes,
            is_dependent=is_dependent,
        )
