"""The kernel ``divide_rows``: how many rows of each expert with several owners go to each of them."""

from __future__ import annotations

from fusco.cuda.kernels.abi import I32, POINTER, struct
from fusco.cuda.kernels.choose_owners import DeviceOwnerTables
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.tuning import DIVIDE_ROWS_THREADS

# ``DivideArgs`` of divide_rows.cu.
DivideArgs = struct(
    "DivideArgs",
    (POINTER, "counts divided expert_to_first units owner_to_rank rank_to_node quotas bounds"),
    (I32, "num_ranks num_experts max_divided rank"),
)


def divide_rows(launcher: Launcher, tables: DeviceOwnerTables, *, has_quotas: bool = False) -> None:
    """Write ``bounds`` of this rank's tables from their counts, as ``OwnerTables.divide_rows`` does.

    By shares, or with ``has_quotas`` by ``quotas``, which are used up.
    """
    if not tables.max_divided:
        return
    num_ranks, num_experts = tables.counts.shape
    names = "counts divided expert_to_first owner_to_rank rank_to_node quotas bounds"
    arguments = DivideArgs(
        **{name: getattr(tables, name).data_ptr() for name in names.split()},
        units=0 if has_quotas else tables.units.data_ptr(),
        num_ranks=num_ranks,
        num_experts=num_experts,
        max_divided=tables.max_divided,
        rank=tables.rank,
    )
    launcher.launch(
        "divide_rows",
        {},
        arguments,
        grid=-(-tables.max_divided // DIVIDE_ROWS_THREADS),
        num_threads=DIVIDE_ROWS_THREADS,
        shared_bytes=4 * num_ranks * DIVIDE_ROWS_THREADS,
    )
