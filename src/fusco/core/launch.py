"""How one call is to run: values that a caller may pass to the verbs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fusco.core.integers import MAX_INT32, check_integer


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a call uses its device. Ranks need not agree on it. On the CPU it changes nothing.

    Attributes:
        num_sms: most multiprocessors that a kernel may use; ``None`` means as many as are good for the call.
        own_stream: run on the communicator's own stream instead of the caller's current one. The call's result must
            then not be used before ``Communicator.wait``.

    Raises:
        TypeError, ValueError: for a value of another type, or out of range.

    """

    num_sms: int | None = None
    own_stream: bool = False

    def __post_init__(self) -> None:
        if self.num_sms is not None:
            check_integer("num_sms", self.num_sms, least=1)

    def on_callers_stream(self) -> Launch:
        """The same, on the caller's stream: nobody could say when the result of the backward pass may be used."""
        return replace(self, own_stream=False)


@dataclass(frozen=True)
class StaticSlots:
    """An output of ``num_slots`` expert-major rows, whatever the routing, so that nobody waits for its size.

    Attributes:
        num_slots: rows of the output, padding counted. Those behind the last block are uninitialised, and so are
            those of their gradient: experts must go by ``num_rows_per_expert``.
        on_overflow: ``"raise"`` has the next synchronisation raise ``SlotOverflowError`` if a routing needs more;
            ``"drop"`` leaves out, without a word, the rows that do not fit: those of the last experts.

    Raises:
        TypeError, ValueError: for a value of another type, or out of range.

    """

    num_slots: int
    on_overflow: Literal["raise", "drop"] = "raise"

    def __post_init__(self) -> None:
        check_integer("num_slots", self.num_slots, least=1, most=MAX_INT32)  # as kernels count
        if self.on_overflow not in ("raise", "drop"):
            raise ValueError(f"on_overflow must be 'raise' or 'drop', got {self.on_overflow!r}")
