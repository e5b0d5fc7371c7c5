"""Requests of a serving system: when they arrive, and how many bytes of cache each moves."""

from __future__ import annotations

import random
from dataclasses import dataclass
from importlib import resources

import numpy as np

_SIGMA = 0.8  # of the logarithm of sizes: their coefficient of variation is that of the prompts in Azure's trace, 0.96


@dataclass(frozen=True)
class Arrivals:
    """Requests of one instance: seconds from the beginning, and bytes of each rank."""

    times_s: list[float]
    sizes: list[int]


def poisson(seconds: float, load: float, bytes_per_s: float, mean_bytes: int, seed: int) -> Arrivals:
    """Return Poisson arrivals of log-normal sizes that keep a rail of ``bytes_per_s`` busy for a share ``load``."""
    rng = random.Random(seed)  # noqa: S311  no secret
    times, sizes, now = [], [], 0.0
    mu = np.log(mean_bytes) - _SIGMA**2 / 2
    while (now := now + rng.expovariate(load * bytes_per_s / mean_bytes)) < seconds:
        times.append(now)
        sizes.append(max(1, int(rng.lognormvariate(mu, _SIGMA))))
    return _with_load(times, sizes, load, bytes_per_s, seconds)


def azure(seconds: float, load: float, bytes_per_s: float, mean_bytes: int, instance: int) -> Arrivals:
    """Return arrivals and prompt lengths of Azure's conversation trace, scaled to mean size and load.

    Instances have successive parts of the trace.
    """
    with resources.as_file(resources.files("fusco.data") / "azure_llm_2023_conv.npz") as path, np.load(path) as trace:
        seconds_of_trace, tokens = trace["arrival_s"], trace["context_tokens"]
    count = max(1, round(load * bytes_per_s * seconds / mean_bytes))
    part = slice(instance * count, (instance + 1) * count)
    times, lengths = seconds_of_trace[part] - seconds_of_trace[part][0], tokens[part]
    scale = seconds * (1 - 1 / count) / max(times[-1], 1e-9)
    sizes = np.maximum(1, lengths * (mean_bytes / lengths.mean())).astype(int)
    return Arrivals([float(each * scale) for each in times], [int(size) for size in sizes])


def _with_load(times: list[float], sizes: list[int], load: float, bytes_per_s: float, seconds: float) -> Arrivals:
    """Scale sizes so that short runs have the load, too; their sum varies much from seed to seed."""
    scale = load * bytes_per_s * seconds / max(1, sum(sizes))
    return Arrivals(times, [max(1, int(size * scale)) for size in sizes])
