"""A process that owns a GPU's PCIe link and copies now and then, while another process borrows it."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from fusco.core.errors import FuscoError

if TYPE_CHECKING:
    import torch

    from fusco.offload import Copier

_NUM_BURSTS = 12
_PAUSE_S = 0.03  # between bursts; longer than a rail counts as busy after its owner's last activity
_ANSWER_S = 120.0  # limit of a wait for the process


class Owner(AbstractContextManager["Owner"]):
    """The process; ``with`` starts and ends it."""

    def __init__(self, device: int, num_bytes: int) -> None:
        """Start it for a GPU, with memory for bursts of ``num_bytes``."""
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, device, num_bytes), daemon=True)
        self._process.start()
        there.close()

    def bursts(self, num_bytes: int, uses: str) -> list[float]:
        """Copy bursts to host memory and return the seconds of each."""
        self.begin(num_bytes, uses)
        return self.end()

    def begin(self, num_bytes: int, uses: str) -> None:
        """Begin bursts by ``"fusco"`` or ``"cudaMemcpyAsync"``."""
        self._here.send(("burst", num_bytes, uses))

    def fill(self, leaves_bytes: int) -> None:
        """Allocate all memory of the GPU but this; with -1, free it."""
        self._here.send(("fill", leaves_bytes, ""))
        self.end()

    def is_done(self) -> bool:
        """Return whether ``end`` would return at once."""
        return self._here.poll()

    def end(self) -> list[float]:
        """Return the seconds of each burst; raises ``FuscoError`` if the process has failed."""
        if not self._here.poll(_ANSWER_S):
            raise FuscoError(f"the process that owns the other GPU has not answered within {_ANSWER_S:g} s")
        try:
            answer: list[float] = self._here.recv()
        except EOFError:
            raise FuscoError("the process that owns the other GPU has ended; its error is above") from None
        return answer

    def __exit__(self, *_: object) -> None:
        self._here.close()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()


def _serve(commands: Connection, device: int, num_bytes: int) -> None:
    import torch  # noqa: PLC0415  the parent imports this module, too

    from fusco.offload import Copier, OffloadSettings  # noqa: PLC0415

    torch.cuda.set_device(device)
    pair = (
        torch.ones(num_bytes, dtype=torch.uint8, device="cuda"),
        torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True),
    )
    filling = torch.empty(0, dtype=torch.uint8, device="cpu")
    with Copier(device, OffloadSettings(relays_by="nothing")) as copier:
        while True:
            try:
                command, number, uses = commands.recv()
            except EOFError:
                return
            if command == "burst":
                commands.send(_bursts(*pair, copier if uses == "fusco" else None, number))
                continue
            del filling
            torch.cuda.empty_cache()
            count = max(0, torch.cuda.mem_get_info()[0] - number) if number >= 0 else 0
            filling = torch.empty(count, dtype=torch.uint8, device="cuda")
            commands.send([])


def _bursts(tensor: torch.Tensor, pinned: torch.Tensor, copier: Copier | None, num_bytes: int) -> list[float]:
    """Return the seconds of each copy, by a copier or by ``cudaMemcpyAsync``."""
    import torch  # noqa: PLC0415  see above

    from fusco.offload import copy_to_host  # noqa: PLC0415

    times = []
    for _ in range(_NUM_BURSTS + 1):
        time.sleep(_PAUSE_S)
        start = time.perf_counter()
        if copier is None:
            pinned[:num_bytes].copy_(tensor[:num_bytes], non_blocking=True)
            torch.cuda.synchronize()
        else:
            copy_to_host(tensor[:num_bytes], pinned[:num_bytes], copier=copier).synchronize()
        times.append(time.perf_counter() - start)
    return times[1:]
