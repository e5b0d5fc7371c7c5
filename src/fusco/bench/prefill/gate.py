"""Comparison of variants, made before any is timed: layer by layer on the same input, then the logits of all tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fusco.bench.harness.model_job import errors_beyond
from fusco.bench.prefill.variants import EXACT, Layer

_CHUNK = 256  # tokens whose logits are compared at once


@dataclass
class Deviation:
    """Deviation of a variant from the reference, over all tokens of a rank."""

    layer: float = 0.0  # the largest error of a token's output in any layer, relative to the norm of the reference
    logits: float = 0.0  # the largest error of a token's logits
    typical_logits: float = 0.0  # the median of these errors
    num_same_tokens: int = 0  # tokens whose most probable next token is the same
    num_inexact: int = 0  # layers in which the outputs of fusco's variants differ in a bit, and passes repeated that do

    def failures(self, dtype: str) -> list[str]:
        """Describe what is beyond its limit; empty if nothing is."""
        found = errors_beyond(dtype, self.layer, self.logits, "the logits of a token are")
        if self.num_inexact:
            found.append(f"{self.num_inexact} outputs differ from those of fusco in their bits")
        return found


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the error of each row (num_rows, width), relative to the expected row's norm; infinite if not a number.

    >>> relative_error(torch.tensor([[3.0, 4.5]]), torch.tensor([[3.0, 4.0]])).tolist()
    [0.10000000149011612]
    """
    wanted = expected.float()
    norm = torch.linalg.vector_norm
    error: torch.Tensor = norm(out.float() - wanted, dim=1) / norm(wanted, dim=1).clamp(min=1e-20)
    return error.nan_to_num(nan=torch.inf)


def compare_layer(
    layers: Mapping[str, Layer],
    reference: Layer,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    deviations: Mapping[str, Deviation],
) -> torch.Tensor:
    """Run one layer by all variants on the same input, add to their deviations, and return the reference's output."""
    expected, first = reference(*inputs), None
    for name, layer in layers.items():
        out, deviation = layer(*inputs), deviations[name]
        if len(out):
            deviation.layer = max(deviation.layer, float(relative_error(out, expected).max()))
        if name in EXACT:
            first = out.clone() if first is None else first
            deviation.num_inexact += not torch.equal(out, first)
    return expected


def compare_logits(
    hidden: torch.Tensor, expected: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], deviation: Deviation
) -> None:
    """Compare the logits that ``head`` makes of hidden states (num_tokens, hidden), if there are any."""
    if not len(hidden):
        return
    errors, num_same = [], 0
    for ours, theirs in zip(torch.split(hidden, _CHUNK), torch.split(expected, _CHUNK), strict=True):
        logits, wanted = head(ours), head(theirs)
        errors.append(relative_error(logits, wanted))
        num_same += int((logits.argmax(-1) == wanted.argmax(-1)).sum())
    of_tokens = torch.cat(errors)
    deviation.logits = max(deviation.logits, float(of_tokens.max()))
    deviation.typical_logits, deviation.num_same_tokens = float(of_tokens.median()), num_same
