"""Tables of all commands: numbers are whole on every terminal."""

from __future__ import annotations

import ast
import io
import re
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import numpy as np
import pytest
from command_line import ROOT
from rich.console import Console

from fusco.bench.alltoall import ExchangeRecord
from fusco.bench.balance import BalancedBatch, BalanceRecord, CopiedExpert
from fusco.bench.balancers import BalancerRecord
from fusco.bench.decode.records import DecodeRecord
from fusco.bench.explain import Balance, CarriedBytes, PlanRecord, RankLoad, ShuffleRecord as SegmentsRecord
from fusco.bench.host.times import HostRecord
from fusco.bench.offload.copies import OffloadRecord
from fusco.bench.prefill.records import PrefillRecord
from fusco.bench.rails.record import RailsRecord
from fusco.bench.rails.suite import BENCHMARKS
from fusco.bench.schedule import ModeRecord, ScheduleRecord
from fusco.bench.shuffle.records import DeviceRecord, InternodeRecord, ShuffleRecord
from fusco.bench.simulation.papers import PaperRow
from fusco.bench.train.records import Run, RunRecord, StepRecord
from fusco.cli import (
    bench_alltoall,
    bench_decode,
    bench_host,
    bench_links,
    bench_planning,
    bench_prefill,
    doctor,
    plan,
    rails,
    schedule,
    shuffle_tables,
    simulate as simulate_command,
    train,
)
from fusco.cli.doctor import Finding
from fusco.cli.tables import ResultTable
from fusco.core.topology import Topology
from fusco.rails.board import RailUse
from fusco.simulate.cluster import load_cluster
from fusco.simulate.demand import Demand
from fusco.simulate.run import simulate

CLI = ROOT / "src" / "fusco" / "cli"
VALUES = {
    int: 122_239_000_123,
    float: 122_239.0625,
    float | None: 122_239.0625,
    int | None: None,
    str: "a-name",
    bool: True,
}
GPUS = {"gpu": "NVIDIA H200", "cpu": "AMD EPYC 9654 96-Core Processor", "num_cores": 192}
PEAKS = ("copy_engine_pull_gbs", "copy_engine_push_gbs", "sm_pull_gbs", "sm_push_gbs", "local_gbs")
MODEL = SimpleNamespace(num_layers=48, hidden=7168, num_topk=8, num_experts=128, moe_intermediate=768)


def wide(cls, **given):
    """Return a record with wide numbers."""
    hints = get_type_hints(cls)
    values = {field.name: VALUES[hints[field.name]] for field in fields(cls) if hints[field.name] in VALUES}
    return cls(**values | given)


def of_variants(cls, *variants, **given):
    sizes = {"nodes": 4, "ranks_per_node": 16, "errors": [], "batch": 0}
    return [wide(cls, variant=variant, **{**sizes, **given}) for variant in variants]


def device_records(cls, peaks, **given):
    kernels = {"kernel_us": {"scatter_rows": 1.5}} if cls is DeviceRecord else {}
    variants = ("fusco-static", "deep_ep_v2", "baseline")
    on_gpus = {"hardware": GPUS, "peaks": dict.fromkeys(peaks, 369.5), "num_sms": {"dispatch": 132}}
    return of_variants(cls, *variants, **on_gpus, **kernels, **given)


def loads(num_ranks=4):
    return [wide(RankLoad, rank=rank, node=rank // 2) for rank in range(num_ranks)]


def print_shuffle(console, records):
    console.print(shuffle_tables.table_of_records(records))


def print_plan(console):
    balance = {name: wide(Balance) for name in ("lanes", "send-and-receive")}
    rows = [[10**12 + node] * 12 for node in range(12)]
    plan._print(
        wide(
            PlanRecord,
            nodes=12,
            balancer="lanes",
            node_to_node_rows=rows,
            ranks=loads(),
            balance=balance,
            balanced_batch=None,
        ),
        console,
    )


def print_batch(console):
    copies = [wide(CopiedExpert, rank=rank) for rank in range(2)]
    rows = [10**12] * 8
    plan._print_batch(wide(BalancedBatch, limit="places", rows_before=rows, rows_after=rows, copies=copies), console)


def print_simulated(console):
    cluster, topology = load_cluster("h100x8").resized(2, 2), Topology.of_equal_nodes(4, 2)
    demand = Demand.of_matrix("zipf", np.full((4, 4), 122_239_000_123), topology)
    results = [simulate(cluster, demand, "fusco", call) for call in ("dispatch", "combine")]
    console.print(simulate_command.table_of_results(results))
    simulate_command.print_gains(cluster, demand, results, "fluid", 10**9, console)


def print_papers(console):
    rows = [wide(PaperRow, label="fusco.t3.real-world", where="FUSCO, T3", role=role) for role in ("train", "test")]
    console.print(simulate_command.table_of_papers(rows))


def print_stages(console):
    stages = {"dst_node": [[1, 2, 3, 0] * 8] * 3, "num_bytes": [[1] * 32] * 3, "duration_bytes": [10**15] * 3}
    records = [wide(ModeRecord, mode=mode, num_nodes=32, **stages) for mode in ("exact", "spread-out")]
    schedule._print_modes(records, console)
    schedule._print_stages(records[0], console)


def print_matrix(console):
    schedule._print_matrix(np.full((24, 24), 122_239_000_123), "zipf 0.8", console)


def print_host(console):
    steps = {"step_us": {"plan and its records": 122_239.0, "launch": 1.5}}
    sizes = {"device": "null", "ranks_per_node": 8, "num_ranks": 16}
    console.print(
        bench_host._table([wide(HostRecord, variant=each, **sizes, **steps) for each in ("exact", "static") * 4])
    )


def print_offload(console, explain=True):
    results = {"GB/s": 122239.0625, "share of the link": 0.123456, "ms, of the slowest": 1.593e-7, "memory, MiB": 1e9}
    given = {"case": "1.5 GiB from GPU 0, both links busy", "hardware": GPUS, "results": results}
    records = [
        wide(OffloadRecord, benchmark=name, variant=variant, **given)
        for name in ("sizes", "both-busy")
        for variant in ("cudaMemcpyAsync", "D4 + D2")
    ]
    bench_links._print(records, bench_links._OFFLOAD_COLUMNS, "g", ("torch",), console, explain=explain)


def print_rails(console, explain=True):
    results = {f"{name} Gbit/s, of 8 in all": 122239.5 for name in ("receives", "sends", "sends without the borrowed")}
    records = [
        wide(RailsRecord, benchmark=name, case="4 senders to one receiver", policy=policy, results=results)
        for name in BENCHMARKS
        for policy in ("fuselink", "fuselink-paper", "spray", "direct")
    ]
    records = [replace(each, hardware=GPUS, versions={"pyroute2": "0.9"}) for each in records]
    bench_links._print(records, bench_links._RAILS_COLUMNS, ",.3g", ("pyroute2",), console, explain=explain)


def print_prefill(console, explain=True):
    job = SimpleNamespace(num_ranks=8, device="cuda", tokens=8192, dtype="bfloat16", shape=MODEL, num_iterations=20)
    job.variants = ("fusco", "baseline")
    case = {"lengths": [], "errors": [], "iterations": [], "job": {}}
    given = {**case, "hardware": GPUS, "versions": {"torch": "2.11.0", "transformers": "5.9.1"}}
    records = [
        wide(PrefillRecord, variant=name, routing=routing, batch=batch, **given)
        for routing in ("random", "trace")
        for batch in ("1 prompt", "4 prompts", "ragged prompts", "skewed prompts")
        for name in job.variants
    ]
    bench_prefill._print(job, records, {"deep_ep": "not installed"}, console, explain=explain)


def print_decode(console, explain=True):
    job = SimpleNamespace(num_ranks=8, device="cuda", dtype="fp8", context=4096, routing="random", num_iterations=50)
    job.shape, job.variants = MODEL, ("fusco", "fusco-masked", "allgather")
    given = {"errors": [], "job": {}, "hardware": GPUS, "versions": {"torch": "2.11.0"}}
    records = [
        wide(DecodeRecord, variant=name, tokens=tokens, micro_batches=parts, **given)
        for tokens in (1, 8, 32, 64, 128, 256, 512)
        for parts in (1, 2)
        for name in job.variants
    ]
    bench_decode._print(job, records, {"deep_ep": "deep_ep is not installed"}, console, explain=explain)


def print_bench_schedule(console):
    modes = ("exact", "few", "spread-out")
    records = [wide(ScheduleRecord, mode=mode, num_nodes=nodes) for nodes in (8, 1024) for mode in modes]
    console.print(bench_planning._schedule_table(records))


def print_train(console):
    job = SimpleNamespace(shape=MODEL, num_ranks=8, device="cuda", ep_size=8, tokens=8192, dtype="bfloat16")
    job.activation_checkpointing, job.num_steps, job.model, job.architecture = "selective", 200, None, "qwen3_moe"
    given = {"hardware": GPUS, "job": {"num_ranks": 8}, "versions": {"torch": "2.11.0", "transformers": "5.9.1"}}
    records = [wide(RunRecord, dispatcher=name, **given) for name in ("fusco", "torch")]
    train._print(job, records, console)
    steps = [wide(StepRecord, step=step, loss=5.0 - step, dispatcher="fusco") for step in range(3)]
    train._show_learning([Run(steps, 1, 0, None, ("def", " main"))], console, None)
    console.print(train._found(records), soft_wrap=True)


def print_segments(console):
    carried = [wide(CarriedBytes, carrier=0, rank=1, to_node=2)]
    plan._print_shuffle(wide(SegmentsRecord, ranks=loads(), carried=carried), console)


def print_findings(console):
    remedy = "pip install 'cuda-core[cu13]'; CUDA_VISIBLE_DEVICES=0,1,2,3 leaves out others"
    found = "torch 2.13.0+cpu, numba 0.65.1, numpy 2.4.6; 3061.8 GiB free, of 14,336 bytes"
    console.print(doctor._table([Finding("NCCL over rails (fusco.rails.nccl_plugin)", "optional", found, remedy)] * 2))


def print_uses(console):
    uses = [wide(RailUse, rail=rail, interface="enp129s0f0", is_owner=False) for rail in (0, 1)]
    console.print(rails._table(uses, links=False))


CPU_VARIANTS = ("fusco", "no-balancer", "no-lanes", "no-planner", "no-engine", "baseline")
TABLES = {
    "shuffle": lambda console: print_shuffle(console, of_variants(ShuffleRecord, *CPU_VARIANTS)),
    "shuffle, prefills": lambda console: print_shuffle(
        console, [each for batch in (0, 1) for each in of_variants(ShuffleRecord, *CPU_VARIANTS, batch=batch)]
    ),
    "shuffle, GPUs": lambda console: print_shuffle(console, device_records(DeviceRecord, PEAKS)),
    "shuffle, nodes of GPUs": lambda console: print_shuffle(
        console, device_records(InternodeRecord, ("paired_gbs", "spread_gbs"), emulation="set: nothing")
    ),
    "all-to-all": lambda console: console.print(
        bench_alltoall._table(
            [wide(ExchangeRecord, matrix=matrix, schedule="spread-out", errors=[]) for matrix in ("zipf", "trace")]
        )
    ),
    "balancers": lambda console: console.print(
        bench_planning._balancer_table(
            [wide(BalancerRecord, balancer=name, nodes=16, ranks_per_node=8) for name in ("lanes", "send-and-receive")],
            1000,
        )
    ),
    "balance of experts": lambda console: console.print(
        bench_planning._balance_table([wide(BalanceRecord, ranks=each, trace="a, layer 0") for each in (8, 64)])
    ),
    "host": print_host,
    "offload": print_offload,
    "rails of a bench": print_rails,
    "overview of rails": partial(print_rails, explain=False),
    "overview of copies": partial(print_offload, explain=False),
    "prefill": print_prefill,
    "cases of a prefill": partial(print_prefill, explain=False),
    "decode": print_decode,
    "cases of a decode": partial(print_decode, explain=False),
    "bench of schedules": print_bench_schedule,
    "plan": print_plan,
    "plan of a batch": print_batch,
    "plan of segments": print_segments,
    "simulated": print_simulated,
    "published results": print_papers,
    "uses of rails": print_uses,
    "matrix": print_matrix,
    "modes and stages": print_stages,
    "doctor": print_findings,
    "train": print_train,
}


@pytest.fixture(autouse=True)
def without_charts(monkeypatch):
    monkeypatch.setattr(schedule, "draw_gantt", lambda *_: [])  # as wide as the terminal


def shown(show, width):
    console = Console(width=width, file=io.StringIO(), _environ={})
    show(console)
    return console.file.getvalue()


def words(text):
    """Return the words of a text, without the lines of tables."""
    return set(re.sub("[\u2500-\u257f]", " ", text).split())


@pytest.mark.parametrize("name", TABLES)
def test_numbers_are_whole_and_nothing_is_left_out(name):
    whole = words(shown(TABLES[name], 2000))
    for width in (80, 140):
        text = shown(TABLES[name], width)
        in_tables = [line for line in text.splitlines() if re.search("[\u2500-\u257f]", line)]
        assert max(map(len, in_tables)) <= width
        assert words(text) == whole


def test_every_table_is_tested(monkeypatch):
    made, make = set(), ResultTable.__init__

    def note(table, *arguments, **options):
        caller = sys._getframe(1).f_code
        if caller.co_name == "table_of":
            caller = sys._getframe(2).f_code
        made.add((Path(caller.co_filename).name, caller.co_name))
        make(table, *arguments, **options)

    monkeypatch.setattr(ResultTable, "__init__", note)
    for show in TABLES.values():
        shown(show, 100)
    sources = {path.name: path.read_text() for path in CLI.glob("*.py")}
    assert made == {
        (name, function.name)
        for name, source in sources.items()
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef)
        and function.name != "table_of"
        and re.search(r"\b(ResultTable|table_of)\(", ast.unparse(function))
    }
    assert [name for name, source in sources.items() if "rich.table" in source] == ["tables.py"]


def test_a_table_that_is_too_wide_is_printed_in_parts_with_all_names():
    table = ResultTable("times", ("", *(f"time {i}, ms" for i in range(9))), ["a note"])
    table.add_row("no-balancer", *(f"12,345.{i}" for i in range(9)))
    table.add_row("one", "1.5", *[""] * 8)
    lines = shown(lambda console: console.print(table), 60).splitlines()
    assert (lines[0].strip(), lines[-1].strip()) == ("times", "a note")
    parts = [line.replace("\u2502", " ").split() for line in lines if "no-balancer" in line]
    assert [part[0] for part in parts] == ["no-balancer"] * len(parts)
    assert [cell for part in parts for cell in part[1:]] == [f"12,345.{i}" for i in range(9)]
    assert sum("one" in line for line in lines) == 1


@pytest.mark.parametrize(("num_ranks", "ratio"), [(1, "-"), (2, "1.00")])
def test_a_baseline_of_one_rank_alone_is_compared_with_nothing(num_ranks, ratio):
    records = device_records(DeviceRecord, PEAKS, nodes=1, ranks_per_node=num_ranks)
    lines = shown(lambda console: print_shuffle(console, records), 200).splitlines()
    rows = [line.replace("\u2502", " ").split() for line in lines if "yes" in line]
    assert [row[5] for row in rows] == [ratio] * 3  # after variant, dispatch, combine, both and in a row


def test_two_nodes_that_share_a_gpu_say_so():
    shared = {"hardware": {**GPUS, "num_gpus": 1}, "peaks": {"paired_gbs": 1.0, "spread_gbs": 1.0}}
    records = of_variants(InternodeRecord, "fusco", nodes=2, ranks_per_node=1, num_sms={}, **shared)
    text = shown(lambda console: print_shuffle(console, records), 200)
    assert "2 nodes x 1 rank, " in text
    assert "2 ranks that share 1 x NVIDIA H200" in text
    assert "2 x NVIDIA H200" not in text.replace("that share 1 x", "")


def test_names_wrap_before_a_number_is_cut_and_a_list_is_the_last_resort():
    table = ResultTable("", ("", "dispatch\nGB/s"), left=("",))
    table.add_row("only rearranging, of each", "122,239.0")
    for width in (60, 30, 24, 16):
        text = shown(lambda console: console.print(table), width)
        assert "122,239.0" in text
        assert words(text) >= {"only", "rearranging,", "of", "each", "GB/s"}
        assert max(map(len, text.splitlines())) <= width
