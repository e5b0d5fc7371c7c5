"""Use of PCIe links by a copier together with the other processes of the host."""

from __future__ import annotations

import threading
import time
import warnings
from contextlib import ExitStack

from fusco.core.errors import FuscoError
from fusco.core.threads import limit_now
from fusco.offload.driver import CudaDriver
from fusco.offload.mover import FROM_HOST, TO_HOST, Mover, Options
from fusco.offload.relay import Relay, RelayHost, Resources, direct_path
from fusco.offload.settings import GpuLinks, Machine, OffloadSettings, rails_of_links
from fusco.rails.board import Board

_KEEP_S, _RETRY_S = 0.1, 1.0  # between looks at the memory of relays, and between attempts to open one
_NUM_BLOCKS = 32  # of the kernel of D1 and D3: they saturate NVLink


class NoRelayError(FuscoError):
    """Only the GPU's own link can be used; the text is the reason."""


class SharedLinks:
    """A GPU's row of the board, its mover, and its relays with the thread that watches their memory."""

    def __init__(self, machine: Machine, device: int, context: int, settings: OffloadSettings) -> None:
        """Register, and take memory on relays.

        Raises ``NoRelayError`` if no other link can be used, which says why; ``OSError``, ``SharedMemoryError``,
        ``CompileError`` or ``LaunchError`` if anything else is missing.
        """
        links, to_link = _find_links(machine, device, settings)
        self._link, self._device, self._limit_s = to_link.pop(device), device, settings.timeout_s
        self._max_relays, self._next_try_s = settings.budget.max_relays, 0.0
        self.relays: list[Relay] = []  # the GPUs whose links may be taken
        self._ending, self._is_ending = ExitStack(), threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)
        try:
            self.rail_names = self._register(machine, links, settings)
            self.mover = self._new_mover(machine.driver, context, settings)
            host = RelayHost(machine.driver, context, links, settings.limits, settings.budget, self.mover)
            if settings.relays_by != "nothing":
                self.relays = [Relay(host, peer, link) for peer, link in to_link.items()]
                self._open_first()
            if machine.has_threads:
                self.mover.start()
                self._keeper.start()
        except BaseException:
            self.close()
            raise

    @property
    def reason(self) -> str:
        """Reason why only the GPU's own link may be taken now; empty if others may."""
        if any(relay.is_open for relay in self.relays):
            return ""
        reasons = [f"GPU {relay.device} is no relay: {relay.reason}" for relay in self.relays]
        return "; ".join(reasons) or "the settings borrow no link"

    def announce(self, direction: int) -> None:
        """Say that the GPU uses its own link, without the mover."""
        self._board.announce(2 * self._link + direction)

    def keep(self) -> None:
        """Give back what relays hold whose memory is low, open others, and free the rows of dead workers."""
        try:
            closed = [relay for relay in self.relays if relay.check()]
            if (now := time.monotonic()) >= self._next_try_s:
                self._next_try_s = now + _RETRY_S
                for relay in self.relays:
                    if relay not in closed and sum(each.is_open for each in self.relays) < self._max_relays:
                        relay.open()
        finally:
            self._board.reset_dead()

    def close(self) -> None:
        """Give everything back. May be called again.

        ``FuscoError`` if the watch of relays does not end within ``settings.timeout_s``; then nothing is given back
        before the process ends, since the watch may still use it.
        """
        self._is_ending.set()
        if self._keeper.is_alive():
            self._keeper.join(limit_now(self._limit_s))
            if self._keeper.is_alive():
                raise FuscoError(
                    f"GPU {self._device} could not give back its relays: the thread that watches their memory did not "
                    f"end within {self._limit_s:g} s; it waits for NVML, or for a relay's chunks"
                )
        with self._ending, ExitStack() as closing:  # all of them, whichever raises
            for relay in self.relays:
                closing.callback(relay.close, "the copier was closed")

    def _open_first(self) -> None:
        self.keep()
        if self.reason:
            raise NoRelayError(self.reason)

    def _register(self, machine: Machine, links: GpuLinks, settings: OffloadSettings) -> list[str]:
        rails, limits = rails_of_links(links), settings.limits
        self._board = Board(machine.board())
        self._ending.callback(self._board.close)
        rest_s = max(0.0, limits.hold_s - limits.release_s)
        self._board.register(self._link, 0b11 << 2 * self._link, rails, rest_s)
        return [rail.interface for rail in rails]

    def _new_mover(self, driver: CudaDriver, context: int, settings: OffloadSettings) -> Mover:
        resources = Resources(driver)
        self._ending.callback(resources.close)
        options = Options.of(settings.limits)
        if "threads" in (settings.relays_by, settings.own_link_by):
            options.kernel, options.num_blocks = resources.copy_kernel(context), _NUM_BLOCKS
            options.relays_by_kernel = settings.relays_by == "threads"
            options.own_link_by_kernel = settings.own_link_by == "threads"
        mover = Mover(driver.table(), options, self._board, 0b11 << 2 * self._link)
        self._ending.callback(mover.close)
        if settings.own_link_by != "nothing":
            for direction in (TO_HOST, FROM_HOST):
                path = direct_path(resources, context, settings.limits.direct_depth)
                mover.open_path(2 * self._link + direction, path)
        return mover

    def _keep(self) -> None:
        """Run ``keep`` again and again, in a thread; say what it raises, each error once."""
        warned_of = ""
        while not self._is_ending.wait(_KEEP_S):
            try:
                self.keep()
            except (OSError, FuscoError) as error:
                if str(error) != warned_of:
                    warned_of = str(error)
                    warnings.warn(f"relays are checked again after an error: {warned_of}", RuntimeWarning, stacklevel=1)


def _find_links(machine: Machine, device: int, settings: OffloadSettings) -> tuple[GpuLinks, dict[int, int]]:
    """Return the links of this host, and by device the link of this GPU and of those that may be its relays."""
    driver: CudaDriver = machine.driver
    count = driver.num_devices()
    others = [(device + i) % count for i in range(1, count)] if settings.relays is None else list(settings.relays)
    if unknown := [peer for peer in others if peer == device or not 0 <= peer < count]:
        raise ValueError(f"relays of GPU {device} must be other GPUs among the {count} of this process, got {unknown}")
    if not others:
        raise NoRelayError("this process sees one GPU" if count == 1 else "the settings name no relay")
    links = machine.links()
    to_link = {each: links.index_of(driver.bus_id(each)) for each in (device, *others)}
    num_links = len(rails_of_links(links)) // 2
    near = {
        peer for peer in others if driver.can_access(device, peer) and links.has_nvlink(to_link[device], to_link[peer])
    }
    if to_link[device] >= num_links or not near:
        names = ", ".join(map(str, others))
        raise NoRelayError(f"GPU {device} has no access over NVLink to the memory of GPU {names}")
    return links, {each: link for each, link in to_link.items() if each in {device, *near} and link < num_links}
