"""Environment of a record, as one line below every table."""

from __future__ import annotations

from typing import Protocol


class Measured(Protocol):
    """A record with its environment."""

    @property
    def versions(self) -> dict[str, str]:
        """See ``fusco.bench.environment.versions``."""

    @property
    def hardware(self) -> dict[str, str | int | float]:
        """See ``fusco.bench.environment.hardware``."""

    @property
    def commit(self) -> str:
        """See ``fusco.bench.environment.commit``."""


def describe_origin(record: Measured, num_ranks: int, packages: tuple[str, ...] = ("torch",)) -> str:
    """Describe the GPUs, one for each rank, or the processor; versions of packages; the commit."""
    hardware = record.hardware
    machine = (
        f"{num_ranks} x {hardware['gpu']}" if "gpu" in hardware else f"{hardware['cpu']}, {hardware['num_cores']} cores"
    )
    source = f"fusco {record.versions['fusco']}" if record.commit == "none" else f"commit {record.commit}"
    return "; ".join([machine, *(f"{name} {record.versions[name]}" for name in packages), source])
