"""What a record was made with, in the one line that stands below every table."""

from __future__ import annotations

from typing import Protocol


class Measured(Protocol):
    """A record that says what it was made with."""

    @property
    def versions(self) -> dict[str, str]:
        """As ``fusco.bench.environment.versions``."""

    @property
    def hardware(self) -> dict[str, str | int | float]:
        """As ``fusco.bench.environment.hardware``."""

    @property
    def commit(self) -> str:
        """As ``fusco.bench.environment.commit``."""


def describe_origin(record: Measured, num_ranks: int, packages: tuple[str, ...] = ("torch",)) -> str:
    """The GPUs, one for each rank, or else the processor; versions of packages; the commit."""
    hardware = record.hardware
    machine = (
        f"{num_ranks} x {hardware['gpu']}" if "gpu" in hardware else f"{hardware['cpu']}, {hardware['num_cores']} cores"
    )
    return "; ".join([machine, *(f"{name} {record.versions[name]}" for name in packages), f"commit {record.commit}"])
