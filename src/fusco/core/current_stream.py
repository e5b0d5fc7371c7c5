"""What the current stream of this thread is, and which CUDA graph captures it."""

from __future__ import annotations

from typing import Any

import torch

from fusco.core.errors import TransportError

# The handle of a device's current stream in 0.1 us; PyTorch's public function makes an object, which takes 2. Builds of
# PyTorch for CPUs have none.
raw_stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: SLF001


def is_capturing() -> bool:
    """Return whether a CUDA graph captures the current stream; builds of PyTorch for CPUs raise if they are asked."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def capture_number() -> int:
    """Return a number of the capture that the current stream is in, of no other in this process; 0 if it is in none."""
    if not is_capturing():
        return 0
    from cuda.bindings import driver  # noqa: PLC0415  of the extra fusco[cuda]

    result, _, number, *_ = driver.cuStreamGetCaptureInfo(driver.CUstream(torch.cuda.current_stream().cuda_stream))
    if int(result):
        raise TransportError(f"the capture of a CUDA graph could not be identified: {result.name}")
    return int(number)
