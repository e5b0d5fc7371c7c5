"""``fusco bench alltoall``: a scheduled all-to-all compared with ``all_to_all_single``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.text import Text

from fusco.bench.names import ExchangeMatrix
from fusco.cli import options
from fusco.cli.reports import Column, report, table_of
from fusco.cli.running import check_room, new_console, run_on_ranks
from fusco.cli.schedule import ShownMode
from fusco.cli.tables import ResultTable, conclusion, describe_origin, headline, shape_of, verified, verified_cell
from fusco.cli.testbed import PlaceOptions
from fusco.cli.wording import plural
from fusco.core.topology import Topology

if TYPE_CHECKING:
    from fusco.bench.alltoall import ExchangeRecord, ExchangeRun
    from fusco.bench.inputs.traffic import Workload


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """Options that say what is exchanged and how, except ``--matrix``, and the runs that they describe."""

    bytes_per_rank: Annotated[int, typer.Option(min=1, max=1 << 50, help="Mean bytes that a rank sends to others.")] = (
        16 << 20
    )
    skew: options.Skew = 0.8
    schedule: Annotated[ShownMode, typer.Option(help="How stages are made.")] = "auto"
    slice_bytes: Annotated[int, typer.Option(min=1, help="Bytes of one message between nodes.")] = 1 << 20
    ring_depth: options.RingDepth = 4
    timeout_s: options.Timeout = 60.0

    def runs(
        self, kinds: Sequence[Any], topology: Topology, routing: options.RoutingOptions, place: PlaceOptions
    ) -> list[ExchangeRun]:
        """Return a run for each kind of matrix."""
        from fusco.bench.alltoall import ExchangeRun
        from fusco.bench.inputs.matrices import make_rank_bytes
        from fusco.core.config import Settings

        workload, sizes = _replay(routing, topology, kinds), (topology.world_size, self.bytes_per_rank)
        return [
            ExchangeRun(
                matrix=kind,
                rank_bytes=make_rank_bytes(kind, *sizes, self.skew, routing.seed, workload),
                topology=topology,
                bytes_per_rank=self.bytes_per_rank,
                skew=self.skew if kind == "zipf" else 0.0,
                seed=routing.seed,
                mode=None if self.schedule == "auto" else self.schedule,
                settings=Settings(slice_bytes=self.slice_bytes, ring_depth=self.ring_depth, timeout_s=self.timeout_s),
                device=place.device,
                rank_gbs=place.rank_gbs,
            )
            for kind in kinds
        ]


def alltoall(
    context: typer.Context,
    *,
    place: PlaceOptions,
    matrix: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[" + "|".join(get_args(ExchangeMatrix)) + "],...",
            help="Sizes of messages; several with commas, or repeated. Default: all four.",
        ),
    ] = None,
    exchange: ExchangeOptions,
    routing: options.RoutingOptions,
    iterations: options.Iterations = 20,
    json: options.JsonFile = None,
) -> None:
    """Compare an all-to-all of skewed sizes with torch.distributed's, on processes of this machine that emulate nodes.

    On a testbed (--testbed) ranks have a host and a network, and the bound is that of the network's rate.
    On CUDA with several nodes, ranks of different nodes communicate over sockets on the loopback device.

    Outputs are compared bit for bit before anything is timed. Exit code 1 if they differ.
    """
    kinds = options.choose_names(matrix, get_args(ExchangeMatrix), "matrix")
    options.check_skew(options.given_options(context), "--matrix", kinds)
    from fusco.bench.alltoall import VARIANTS, run_rank, summarize  # it takes seconds, and names are right now
    from fusco.cpu.kernels.warm_up import warm_up_cpu
    from fusco.schedule import warm_up

    topology = place.topology()
    runs = exchange.runs(kinds, topology, routing, place)
    prepare, num_ranks = (warm_up_cpu, lambda _: warm_up()), topology.world_size
    place.run_there((warm_up_cpu, warm_up))
    console = new_console(json)
    if place.device == "cpu":
        largest = max(int(run.rank_bytes.sum()) for run in runs)  # once as input, and as output of each variant
        check_room("buffers (--bytes-per-rank)", (1 + len(VARIANTS)) * largest // num_ranks, num_ranks)
    where: dict[str, Any] = {"device": place.device, "topology": topology, "prepare": prepare}
    ranks = run_on_ranks(run_rank, (runs, iterations), num_ranks, console, **where)
    if ranks is None:
        return  # rank 0 of the launched job has the results
    records = [
        summarize(run, [links for links, _ in ranks], [results[i] for _, results in ranks])
        for i, run in enumerate(runs)
    ]
    report(records, [_table(records), *map(_headline, records)], console, json, lambda record: record.matrix)


def _headline(record: ExchangeRecord) -> Text:
    times = {"fusco": record.fusco_ms, "all_to_all_single": record.all_to_all_single_ms}
    return conclusion(headline(times, "fusco", record.matrix, verified(record.verified)))


def _replay(routing: options.RoutingOptions, topology: Topology, kinds: Sequence[str]) -> Workload | None:
    """Return the trace, if it is wanted, on consecutive experts, as evenly as the number of ranks allows."""
    from fusco.bench.inputs.traffic import Trace, Workload
    from fusco.core.placement import ExpertPlacement

    if "trace" not in kinds:
        routing.check_no_trace("--matrix", kinds)
        return None
    num_experts, world_size = routing.num_experts, topology.world_size
    owners = [expert * world_size // num_experts for expert in range(num_experts)]
    return Workload(
        pattern="trace",
        topology=topology,
        placement=ExpertPlacement.explicit(owners, world_size),
        tokens=routing.tokens,
        hidden=1,
        num_topk=routing.num_topk,
        seed=routing.seed,
        trace=Trace.load(routing.trace, routing.trace_key, routing.layer or 0),
    )


_COLUMNS: tuple[Column, ...] = (
    ("matrix", lambda of: f"{of.matrix} {of.skew:g}" if of.skew else of.matrix),
    ("fusco\nms", "{.fusco_ms:,.1f}"),
    ("all_to_all_\nsingle, ms", "{.all_to_all_single_ms:,.1f}"),
    ("that\n/ fusco", lambda of: f"{of.all_to_all_single_ms / of.fusco_ms:.2f}"),
    ("bound\nms", "{.lower_bound_ms:,.1f}"),
    ("fusco\n/ bound", lambda of: f"{of.fusco_ms / of.lower_bound_ms:.2f}" if of.lower_bound_ms else "-"),
    ("schedule,\nstages", "{0.schedule}, {0.num_stages}"),
    ("between\nnodes, MB", lambda of: f"{of.internode_bytes / 1e6:,.1f}"),
    ("busiest rank:\nall_to_all_single", lambda of: f"{of.busiest_rank_bytes / 1e6:,.1f}"),
    ("lane:\nfusco", lambda of: f"{of.lane_bytes / 1e6:,.1f}"),
    ("\nbound, MB", lambda of: f"{of.lane_bytes_lower_bound / 1e6:,.1f}"),
    ("verified", lambda of: verified_cell(of.verified)),
)


def _table(records: Sequence[ExchangeRecord]) -> ResultTable:
    one = records[0]
    title = (
        f"all-to-all: {shape_of(one.nodes, one.ranks_per_node)}, {one.bytes_per_rank / 1e6:,.1f} MB a rank on "
        f"average, on {one.device}"
    )
    rate = f"the {one.rank_gbs:.4g} GB/s of a rank's rails" if one.rank_gbs else "that peak"
    notes = (
        f"medians of {plural(one.num_iterations, 'iteration')}, the slowest rank's time; links, all ranks sending "
        f"at once: between nodes {one.internode_peak_gbs:.2f} GB/s per rank and direction, copy "
        f"{one.copy_peak_gbs:.1f} GB/s",
        f"bound: the busiest node's bytes, shared by its ranks, at {rate}",
        describe_origin(one, one.nodes * one.ranks_per_node),
    )
    return table_of(records, title, _COLUMNS, notes, left=("matrix",))
