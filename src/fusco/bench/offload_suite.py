"""All benchmarks of copies over PCIe links, as far as this machine's GPUs allow."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from fusco.bench import offload
from fusco.bench.offload_peer import Owner

BENCHMARKS = ("sizes", "variants", "both-busy", "owner", "memory")
_BURST_BYTES = 270 << 20  # 5 ms of a link


def run(
    show: offload.Show, names: Sequence[str], sizes: Sequence[int], chunks: Sequence[int], variants: Sequence[str]
) -> None:
    """Run benchmarks by name on GPU 0, with GPU 1 as the other; with one GPU only ``sizes``, of its own link."""
    largest = max(sizes)
    memory = offload.Memory(0, max(largest, _BURST_BYTES))
    has_other = torch.cuda.device_count() > 1
    with ExitStack() as ending:
        owner = ending.enter_context(Owner(1, _BURST_BYTES)) if has_other and {"owner", "memory"} & set(names) else None
        if "sizes" in names:
            offload.measure_sizes(show, sizes, memory)
        if not has_other:
            return
        if owner and "memory" in names:
            offload.measure_memory(show, memory, owner)
        if owner and "owner" in names:
            offload.measure_owner(show, memory, owner, _BURST_BYTES, largest)
        ending.close()
        if "both-busy" in names:
            offload.measure_both_busy(show, [memory, offload.Memory(1, largest)], largest)
        if "variants" in names:
            offload.measure_variants(show, chunks, variants, memory, min(largest, 256 << 20))
