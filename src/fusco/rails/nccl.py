"""NCCL over rails: the network plugin, compiled when first used, and the environment by which NCCL takes it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fusco.rails.binding import library_path, texts_of
from fusco.rails.policy import Limits, Policy
from fusco.rails.rail import Rail, check_rails, configured_rails, discover_rails

# A channel of NCCL has 8 chunks under way, in both directions at once not enough for more than one rail: 4 rails had
# 0.89 of their rate with two channels, 0.98 with four, 0.95 with eight (testbed, chunks as long as at 10 Gbit/s).
_MOST_CHANNELS = 8
# NCCL's interface version 11 came with 2.28, version 10 before; the plugin has both.
_LEAST_NCCL, _NEWEST_NCCL = (2, 27), (2, 30)


def nccl_plugin(
    rails: Sequence[Rail] | None = None,
    *,
    worker: int | None = None,
    policy: str | Policy = "fuselink",
    limits: Limits | None = None,
    board: Path | None = None,
    timeout_s: float = 60.0,
) -> dict[str, str]:
    """Return the environment with which NCCL sends between hosts over all rails.

    Set it before NCCL starts, for example with ``os.environ.update(nccl_plugin())`` ahead of ``init_process_group``;
    all processes of a job need it. The plugin is compiled by the system's C compiler when first used, and kept.

    Args:
        rails: the rails of this host, in the order that all hosts have; by default those that ``FUSCO_RAILS`` names,
            or ``discover_rails()``, for as many workers as torchrun has started on this host.
        worker: this process's number on its host, which must own a rail; by default ``LOCAL_RANK`` as of torchrun,
            or 0.
        policy: as of ``Endpoint``.
        limits: bounds of the scheduler; at most 32 chunks may be outstanding on a rail.
        board: the file of the board; by default that of this user and network namespace.
        timeout_s: the limit of connecting. NCCL's requests have none, but those whose peer or rails are lost fail.

    Raises:
        ValueError: for rails or a policy that cannot be, and for an NCCL that the plugin does not know.
        CompileError: without a C compiler, or if it fails.
    """
    if why_not := why_not_nccl(nccl_version()):
        raise ValueError(why_not)
    if rails is None:
        num_workers = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None
        rails = configured_rails(num_workers) or discover_rails(None, num_workers)
    rails, limits, library = check_rails(rails), limits or Limits(), library_path()
    num_channels = str(max(2, min(_MOST_CHANNELS, len(rails))))
    texts = texts_of(worker, rails, policy, limits, timeout_s, board)
    return {
        "NCCL_NET_PLUGIN": str(library),
        "NCCL_NET": "fusco",  # so NCCL fails without it, instead of falling back to sockets
        "NCCL_P2P_NET_CHUNKSIZE": str(limits.chunk_bytes),  # of send and receive; NCCL's default is a quarter
        "NCCL_NCHANNELS_PER_NET_PEER": num_channels,  # also of send and receive
        "NCCL_MIN_P2P_NCHANNELS": num_channels,  # by which NCCL bounds the former
        "NCCL_SOCKET_IFNAME": "=" + ",".join(rail.interface for rail in rails),  # for control messages of NCCL itself
        **{f"FUSCO_NCCL_{name.upper()}": text for name, text in texts.items()},
    }


def nccl_version() -> tuple[int, ...] | None:
    """Return the version of this torch's NCCL, such as ``(2, 28, 9)``; ``None`` if it has none."""
    import torch  # noqa: PLC0415  loads for seconds

    try:
        return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):  # a torch without CUDA
        return None


def why_not_nccl(version: tuple[int, ...] | None) -> str:
    """Return why an NCCL does not load the plugin; empty if it does, or is not known.

    >>> why_not_nccl((2, 28, 9)), why_not_nccl((2, 26, 5))
    ('', "the plugin is for NCCL 2.27 to 2.30, and this torch's is 2.26.5")
    """
    if version is None or _LEAST_NCCL <= version[:2] <= _NEWEST_NCCL:
        return ""
    known = " to ".join(".".join(map(str, each)) for each in (_LEAST_NCCL, _NEWEST_NCCL))
    return f"the plugin is for NCCL {known}, and this torch's is {'.'.join(map(str, version))}"
