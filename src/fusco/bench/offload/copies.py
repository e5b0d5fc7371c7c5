"""Copies between GPUs and pinned host memory: over one PCIe link, over several, and while their owners copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import torch

from fusco.bench.harness.environment import Measurement, hardware
from fusco.bench.harness.worker import Worker
from fusco.core.errors import FuscoError
from fusco.offload import Copier, OffloadSettings, copy_from_host, copy_to_host
from fusco.offload.mover import MAX_SLOTS
from fusco.offload.settings import LINK_LIMITS, nvml_links
from fusco.rails.policy import Limits

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


MB = 1 << 20
SIZES = tuple(size * MB for size in (1, 16, 64, 256, 1024))
CHUNKS = (512 << 10, 2 * MB, 8 * MB)
BENCHMARKS = ("sizes", "variants", "both-busy", "owner", "memory")
_BURST_BYTES = 270 << 20  # 5 ms of a link
_OUTSTANDING_BYTES = 16 * MB  # borrowed on a link at most, whatever the size of chunks
_NUM_REPEATS = 5
_DIRECTIONS = {"to host": copy_to_host, "from host": copy_from_host}
#: What moves chunks over the GPU's own link and over others, by name (FuseLink, Figure 6).
VARIANTS = {
    "D4": OffloadSettings(min_bytes=0, relays_by="nothing"),
    "D3": OffloadSettings(min_bytes=0, relays_by="nothing", own_link_by="threads"),
    "D1": OffloadSettings(min_bytes=0, own_link_by="nothing", relays_by="threads"),
    "D2": OffloadSettings(min_bytes=0, own_link_by="nothing"),
    "D4 + D1": OffloadSettings(min_bytes=0, relays_by="threads"),
    "D4 + D2": OffloadSettings(min_bytes=0),
}


@dataclass(frozen=True)
class OffloadRecord(Measurement):
    """One row of a table."""

    benchmark: str  # its name
    case: str  # what is copied, in words
    variant: str  # what copies it: ``cudaMemcpyAsync``, or a name of ``VARIANTS``
    num_bytes: int  # bytes of a copy
    chunk_bytes: int  # bytes of what one launch copies; 0: all of it
    results: dict[str, float]  # measured values by name, with units. GB/s are 1e9 bytes.
    hardware: dict[str, str | int | float] = field(default_factory=lambda: hardware("cuda"), kw_only=True)

    @property
    def title(self) -> str:
        """Title of a table of such records."""
        return self.benchmark


class Memory:
    """The largest pair of tensors on one GPU and in pinned host memory; smaller ones are parts of it."""

    def __init__(self, device: int, num_bytes: int) -> None:
        self.device = device
        generator = torch.Generator(f"cuda:{device}").manual_seed(device)
        self._tensor = torch.randint(255, (num_bytes,), dtype=torch.uint8, device=f"cuda:{device}", generator=generator)
        self._pinned = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def of(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first bytes of both."""
        return self._tensor[:num_bytes], self._pinned[:num_bytes]

    def verify(self, copier: Copier, num_bytes: int) -> None:
        """Copy there and back and compare; raises ``FuscoError``."""
        tensor, pinned = self.of(num_bytes)
        pinned.fill_(7)
        copy_to_host(tensor, pinned, copier=copier).synchronize()
        back = torch.full_like(tensor, 7)
        copy_from_host(back, pinned, copier=copier).wait()
        if not torch.equal(pinned, tensor.cpu()) or not torch.equal(back, tensor):
            raise FuscoError(f"{num_bytes:,} bytes did not arrive as they were on GPU {self.device}")

    def copy_plainly(self, case: str, num_bytes: int) -> None:
        """Enqueue one ``cudaMemcpyAsync``."""
        tensor, pinned = self.of(num_bytes)
        source, to = (tensor, pinned) if case == "to host" else (pinned, tensor)
        to.copy_(source, non_blocking=True)

    def plain_gbs(self, case: str, num_bytes: int) -> float:
        """Return the GB/s of one ``cudaMemcpyAsync``."""
        return num_bytes / 1e9 / _seconds(lambda: self.copy_plainly(case, num_bytes))

    def gbs(self, case: str, num_bytes: int, copier: Copier) -> float:
        """Return the GB/s of a copy by a copier."""
        tensor, pinned = self.of(num_bytes)
        return num_bytes / 1e9 / _seconds(lambda: _DIRECTIONS[case](tensor, pinned, copier=copier).wait())


def _seconds(start: Callable[[], object]) -> float:
    """Return the median seconds from a call until the stream is done with what it has started."""
    times = []
    for _ in range(_NUM_REPEATS + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        start()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def with_chunks(settings: OffloadSettings, launch_bytes: int) -> OffloadSettings:
    """Return settings with launches of exactly that size, and as many as keep 16 MB on a link, at most 32."""
    depth = max(2, min(MAX_SLOTS // 2, _OUTSTANDING_BYTES // launch_bytes))
    depths = {"direct_first": depth, "direct_depth": 2 * depth, "borrowed_per_rail": depth}
    return replace(settings, limits=Limits(chunk_bytes=launch_bytes, batch=1, **depths))


def measure_sizes(sizes: Sequence[int], memory: Memory) -> Iterator[OffloadRecord]:
    """Compare copies as they are by default with ``cudaMemcpyAsync``, by size."""
    start = time.perf_counter()
    with Copier(memory.device, OffloadSettings()) as copier:
        opening_ms = 1e3 * (time.perf_counter() - start)
        held = sum(relay.held_bytes for relay in copier.relays)
        costs = {"opening ms": round(opening_ms), "MiB on relays": round(held / MB), "relays": len(copier.relays)}
        yield OffloadRecord("costs", copier.reason or "opening", "default", 0, 0, {**costs})
        memory.verify(copier, max(sizes))
        launch_bytes = LINK_LIMITS.batch * LINK_LIMITS.chunk_bytes
        for case in _DIRECTIONS:
            for num_bytes in sizes:
                results = _compared(memory.plain_gbs(case, num_bytes), memory.gbs(case, num_bytes, copier))
                yield OffloadRecord("sizes", case, "default", num_bytes, launch_bytes, results)


def measure_variants(memory: Memory, num_bytes: int) -> Iterator[OffloadRecord]:
    """Measure D1 to D4 by the size of a launch."""
    plain = {case: memory.plain_gbs(case, num_bytes) for case in _DIRECTIONS}
    for name, base in VARIANTS.items():
        for launch_bytes in CHUNKS:
            with Copier(memory.device, with_chunks(base, launch_bytes)) as copier:
                memory.verify(copier, 16 * MB)
                results: dict[str, float] = {}
                for case in _DIRECTIONS:
                    gbs = memory.gbs(case, num_bytes, copier)
                    results |= {f"{case} GB/s": round(gbs, 2), f"{case} / one link": round(gbs / plain[case], 3)}
            yield OffloadRecord("variants", "the other GPU is idle", name, num_bytes, launch_bytes, results)


def measure_both_busy(memories: Sequence[Memory], num_bytes: int) -> Iterator[OffloadRecord]:
    """Two GPUs of this process copy at the same time; each may borrow the other's link when it is idle."""
    for case in _DIRECTIONS:
        plain = num_bytes / 1e9 / _seconds(partial(_copy_plainly, memories, case, num_bytes))
        with ExitStack() as ending:
            copiers = [ending.enter_context(Copier(memory.device)) for memory in memories]
            gbs = num_bytes / 1e9 / _seconds(partial(_copy_all, memories, case, num_bytes, copiers))
        yield OffloadRecord("both busy", f"{case}, each GPU", "default", num_bytes, 0, _compared(plain, gbs))


def _compared(plain: float, gbs: float) -> dict[str, float]:
    return {"cudaMemcpyAsync GB/s": round(plain, 2), "GB/s": round(gbs, 2), "ratio": round(gbs / plain, 3)}


def _copy_plainly(memories: Sequence[Memory], case: str, num_bytes: int) -> None:
    for memory in memories:
        memory.copy_plainly(case, num_bytes)
    torch.cuda.synchronize(memories[-1].device)


def _copy_all(memories: Sequence[Memory], case: str, num_bytes: int, copiers: Sequence[Copier]) -> None:
    begun = zip(memories, copiers, strict=True)
    for copy in [_DIRECTIONS[case](*memory.of(num_bytes), copier=copier) for memory, copier in begun]:
        copy.synchronize()


def measure_owner(memory: Memory, owner: Worker, burst_bytes: int, long_bytes: int) -> Iterator[OffloadRecord]:
    """A GPU copies all the time over both links; another process owns the other one and copies bursts now and then."""
    tensor, pinned = memory.of(long_bytes)
    for uses in ("fusco", "cudaMemcpyAsync"):
        alone = owner.call(Peer.bursts, burst_bytes, uses)
        with Copier(memory.device, OffloadSettings()) as copier:
            copy_to_host(tensor, pinned, copier=copier).synchronize()
            owner.begin(Peer.bursts, burst_bytes, uses)
            start, num_bytes = time.perf_counter(), 0
            while not owner.is_done():
                copy_to_host(tensor, pinned, copier=copier).synchronize()
                num_bytes += long_bytes
            gbs = num_bytes / 1e9 / (time.perf_counter() - start)
            with_borrower = owner.result()
        speed = [burst_bytes / 1e9 / median(times) for times in (alone, with_borrower)]
        slowest = burst_bytes / 1e9 / max(with_borrower)
        results = {
            "owner alone GB/s": round(speed[0], 2),
            "with a borrower": round(speed[1], 2),
            "ratio": round(speed[1] / speed[0], 3),
            "slowest burst": round(slowest / speed[0], 3),
            "borrower GB/s": round(gbs, 2),
        }
        case = f"bursts of {1e3 * burst_bytes / 1e9 / speed[0]:.1f} ms, by {uses}"
        yield OffloadRecord("owner comes back", case, "default", burst_bytes, 0, results)


def measure_memory(memory: Memory, owner: Worker) -> Iterator[OffloadRecord]:
    """PyTorch in another process fills the relay GPU: what copies hold there is given back, and taken again later."""
    tensor, pinned = memory.of(256 * MB)
    with Copier(memory.device) as copier:
        relay, links = copier.relays[0], nvml_links()
        held = relay.held_bytes
        copy = copy_to_host(tensor, pinned, copier=copier)
        owner.call(Peer.fill, 1024 * MB)
        seconds = _wait_until(lambda: bool(copier.reason), 3)
        copy.synchronize()
        low = links.free_bytes(relay.link)
        own = memory.gbs("to host", 256 * MB, copier)
        owner.call(Peer.fill, -1)
        _wait_until(lambda: not copier.reason, 6)
        again = memory.gbs("to host", 256 * MB, copier)
        memory.verify(copier, 64 * MB)
    results = {
        "held MiB": round(held / MB),
        "free MiB when full": 1024,
        "after it was given back": round(low / MB),
        "given back within ms": round(1e3 * seconds, 1),
        "GB/s without": round(own, 2),
        "taken again": round(again, 2),
    }
    yield OffloadRecord("memory", "PyTorch fills the relay", "default", 256 * MB, 0, results)


def _wait_until(holds: Callable[[], bool], limit_s: float) -> float:
    """Return the seconds until something holds; raises ``FuscoError`` after the limit."""
    start = time.perf_counter()
    while not holds():
        if time.perf_counter() - start > limit_s:
            raise FuscoError(f"the memory of the relay GPU was not given back or taken again within {limit_s:g} s")
        time.sleep(0.001)
    return time.perf_counter() - start


def run(names: Sequence[str]) -> Generator[OffloadRecord, None, None]:
    """Run benchmarks by name on GPU 0, with GPU 1 as the other; with one GPU only ``sizes``, of its own link.

    Records are yielded as soon as they are there.
    """
    largest = max(SIZES)
    memory = Memory(0, max(largest, _BURST_BYTES))
    has_other = torch.cuda.device_count() > 1
    with ExitStack() as ending:
        owner = None
        if has_other and {"owner", "memory"} & set(names):
            owner = ending.enter_context(Worker("the process that owns GPU 1", "spawn", Peer, 1, _BURST_BYTES))
        if "sizes" in names:
            yield from measure_sizes(SIZES, memory)
        if not has_other:
            return
        if owner and "memory" in names:
            yield from measure_memory(memory, owner)
        if owner and "owner" in names:
            yield from measure_owner(memory, owner, _BURST_BYTES, largest)
        ending.close()
        if "both-busy" in names:
            yield from measure_both_busy([memory, Memory(1, largest)], largest)
        if "variants" in names:
            yield from measure_variants(memory, 256 * MB)
