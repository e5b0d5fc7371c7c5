"""Form in which partial sums travel between nodes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fusco.core.quantization import QUANTIZED_DTYPES, Quantize


class Wire(NamedTuple):
    """Partial sums on the network: rows of a dtype, or of bytes that are codes and then scales.

    >>> Wire.of(torch.bfloat16, 256, torch.float32), Wire.of(torch.bfloat16, 256, Quantize()).row_bytes
    (Wire(dtype=torch.float32, width=256, quantize=None), 264)
    >>> Wire.of(torch.float32, 8, Quantize())  # gradients of weights: no whole block
    Wire(dtype=torch.float32, width=8, quantize=None)
    """

    dtype: torch.dtype
    width: int  # elements of a row
    quantize: Quantize | None = None

    @classmethod
    def of(cls, dtype: torch.dtype, hidden: int, wanted: torch.dtype | Quantize | None) -> Wire:
        """Return the form for rows of ``hidden`` columns; ``wanted`` is ``Settings.wire_dtype``."""
        if not isinstance(wanted, Quantize):
            return cls(torch.promote_types(dtype, wanted or dtype), hidden)
        if dtype not in QUANTIZED_DTYPES or not hidden or hidden % wanted.columns:
            return cls(dtype, hidden)
        return cls(torch.uint8, wanted.row_bytes(hidden), wanted)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Dtype of the sums before they are sent, and after they have been read."""
        return self.dtype if self.quantize is None else torch.float32

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * self.dtype.itemsize
