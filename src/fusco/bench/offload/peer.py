"""Copies now and then over a PCIe link by the process that owns it, while another one borrows it."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch

from fusco.offload import Copier, OffloadSettings, copy_to_host

_NUM_BURSTS = 12
_PAUSE_S = 0.03  # between bursts; longer than a rail counts as busy after its owner's last activity


class Peer(AbstractContextManager["Peer"]):
    """The GPU of another process: memory for bursts of ``num_bytes``, and a copier over its own link."""

    def __init__(self, device: int, num_bytes: int) -> None:
        torch.cuda.set_device(device)
        self._tensor = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
        self._pinned = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._filling: torch.Tensor | None = None
        self._copier = Copier(device, OffloadSettings(relays_by="nothing"))

    def bursts(self, num_bytes: int, uses: str) -> list[float]:
        """Copy bursts to host memory by ``"fusco"`` or ``"cudaMemcpyAsync"``, and return the seconds of each."""
        tensor, pinned, times = self._tensor[:num_bytes], self._pinned[:num_bytes], []
        for _ in range(_NUM_BURSTS + 1):
            time.sleep(_PAUSE_S)
            start = time.perf_counter()
            if uses == "fusco":
                copy_to_host(tensor, pinned, copier=self._copier).synchronize()
            else:
                pinned.copy_(tensor, non_blocking=True)
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return times[1:]

    def fill(self, leaves_bytes: int) -> None:
        """Allocate all memory of the GPU but this; with -1, free it."""
        self._filling = None
        torch.cuda.empty_cache()
        count = max(0, torch.cuda.mem_get_info()[0] - leaves_bytes) if leaves_bytes >= 0 else 0
        self._filling = torch.empty(count, dtype=torch.uint8, device="cuda")

    def __exit__(self, *_: object) -> None:
        self._copier.close()
