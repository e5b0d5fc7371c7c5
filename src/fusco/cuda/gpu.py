"""GPU of a rank as the engine uses it: streams, events, capture, memory, peers. Benchmarks and tests replace it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed._symmetric_memory as symm_mem

from fusco.control.machine_calls import libc_address
from fusco.control.member_gather import Gather
from fusco.core.current_stream import raw_stream_of
from fusco.core.errors import SharedMemoryError, Stall, TransportError
from fusco.cuda.between_nodes.nccl import NcclTransport
from fusco.cuda.memory.rendezvous import rendezvous


class Gpu:
    """One GPU. Attributes that are functions of PyTorch cost no call of this class."""

    new_event: Callable[[], torch.cuda.Event] = staticmethod(torch.cuda.Event)
    on: Callable[[torch.cuda.Stream], AbstractContextManager[object]] = staticmethod(torch.cuda.stream)
    is_capturing: Callable[[], bool] = staticmethod(torch.cuda.is_current_stream_capturing)
    current_handle: Callable[[int | None], int] = staticmethod(raw_stream_of)  # of a device's current stream
    # The current device; PyTorch's public function asks first whether CUDA is initialised, which takes 0.3 us.
    current_index: Callable[[], int | None] = staticmethod(getattr(torch._C, "_cuda_getDevice", None))  # type: ignore[arg-type]  # noqa: SLF001

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        """Return a stream; a lower number is a higher priority."""
        return torch.cuda.Stream(self.device, priority=priority)

    def current_stream(self) -> torch.cuda.Stream:
        """Return the device's current stream."""
        return torch.cuda.current_stream(self.device)

    def entered(self) -> AbstractContextManager[object]:
        """Return a context in which this device is current."""
        return torch.cuda.device(self.device)

    def enter_thread(self) -> None:
        """Make this device current in a helper thread without invalidating a CUDA-graph capture in another thread.

        ``torch.cuda.graph`` captures in global mode, in which even an event query in any other thread fails and
        invalidates the capture. A thread in thread-local mode is exempt. ``TransportError`` if the mode cannot be set.
        """
        from cuda.bindings import driver  # noqa: PLC0415  of the extra fusco[cuda]

        torch.cuda.set_device(self.device)
        thread_local = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        result, _ = driver.cuThreadExchangeStreamCaptureMode(thread_local)
        if int(result):
            raise TransportError(f"a thread for {self.device} could not set its stream capture mode: {result.name}")

    def post_after_graph(self, semaphore: int) -> None:
        """Post a semaphore of the C library, at an address, after the graph that captures the current stream is gone.

        That is when it and all that was instantiated of it are deleted, and no replay is under way. The driver posts it
        in a thread of its own. ``TransportError`` if it cannot.
        """
        from cuda.bindings import driver  # noqa: PLC0415  of the extra fusco[cuda]

        stream, post = driver.CUstream(torch.cuda.current_stream().cuda_stream), libc_address("sem_post")
        result, _, _, graph, *_ = driver.cuStreamGetCaptureInfo(stream)
        if not int(result):
            flags = int(driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
            result, user_object = driver.cuUserObjectCreate(semaphore, driver.CUhostFn(post), 1, flags)
        if not int(result):
            flags = int(driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE)
            (result,) = driver.cuGraphRetainUserObject(graph, user_object, 1, flags)
        if int(result):
            raise TransportError(f"the end of a CUDA graph on {self.device} could not be watched: {result.name}")

    def collect_garbage(self) -> None:
        """Free memory of peers that is reachable from cycles only, such as those of an error's traceback.

        PyTorch ends the process if such memory is freed while a graph is captured, so it must not be collected later.
        """
        gc.collect()

    def synchronize(self) -> None:
        """Wait, on the host, for all work on the device."""
        torch.cuda.synchronize(self.device)

    def allocate_visible(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed uint8 memory that peers can map; ``SharedMemoryError`` if there is not enough."""
        try:
            memory = symm_mem.empty(max(num_bytes, 16), dtype=torch.uint8, device=self.device)
            memory.zero_()
            self.synchronize()
        except RuntimeError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            raise SharedMemoryError(
                f"{num_bytes:,} bytes of peer-visible memory could not be allocated on {self.device}, which has "
                f"{free:,} of {total:,} free ({str(error).splitlines()[0]}); lower max_tokens_per_rank or "
                f"max_bytes_per_token"
            ) from error
        return memory

    def share(self, memory: torch.Tensor, store_gather: Gather, ranks: Sequence[int], name: str) -> Any:
        """See ``rendezvous``."""
        return rendezvous(memory, store_gather, ranks, name)

    def connect(
        self,
        store_gather: Gather,
        wait_until: Callable[[Callable[[], bool], Callable[[], Stall]], None],
        channels_per_peer: int | None,
    ) -> NcclTransport:
        """See ``NcclTransport``."""
        return NcclTransport(store_gather, self.device, wait_until, channels_per_peer=channels_per_peer)
