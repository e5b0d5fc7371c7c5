"""Interface of a backend's quantisation of rows, before a dispatch and after it; see ``fusco.core.quantization``."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from fusco.core.config import Launch
from fusco.core.quantization import Quantize


class Origin(NamedTuple):
    """What the payloads of a dispatch are of."""

    x: torch.Tensor  # the caller's rows, (num_tokens, hidden)
    quantize: Quantize
    text: str  # of what must be equal on all ranks, beyond the payloads


class Quantizer(Protocol):
    """Quantises rows of this rank. Tensors are on the engine's device."""

    def quantize(
        self, x: torch.Tensor, quantize: Quantize, launch: Launch | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values and scales of each row, (num_tokens, ...), of rows (num_tokens, hidden).

        On a device they are computed on the stream of the launch, in the order of the communicator's calls. On the CPU
        they are uninitialised: the engine quantises as it stages rows, from ``DispatchRequest.origin``.
        """

    def lay_out(
        self, scales: torch.Tensor, quantize: Quantize, hidden: int, launch: Launch | None
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Return scales that a dispatch brought, (..., num_rows, hidden / block), in the layout of ``quantize``.

        On a device this is launched behind the dispatch, on its stream; the event is that of ``Dispatched``.
        """
