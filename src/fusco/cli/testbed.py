"""``fusco testbed``, and benchmarks on a testbed: hosts with rate-limited NICs in namespaces of this machine."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import typer

from fusco.cli.options import AnyNodes, AnyRanksPerNode, Device
from fusco.cli.running import choose_shape, num_devices
from fusco.core.topology import Topology
from fusco.testbed.layout import Layout, parse_rate
from fusco.testbed.testbed import Testbed, exit_code, run_job

_SHAPE = re.compile(r"(\d+)x(\d+)")
_DEFAULT_RATE = "1gbit"
_RATE_HELP = "rate of each rail and direction, headers included: kbit, mbit or gbit"


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Options that say where a benchmark runs."""

    device: Annotated[Device, typer.Option(help="Device of rows.")] = "cpu"
    nodes: AnyNodes = None
    ranks_per_node: AnyRanksPerNode = None
    testbed: Annotated[
        str | None,
        typer.Option(
            metavar="HOSTSxRANKS",
            help="Run on hosts with rate-limited NICs (rails), in network namespaces of this machine, as 4x2.",
        ),
    ] = None
    rate: Annotated[str | None, typer.Option(help=f"On a testbed: {_RATE_HELP}. Default: {_DEFAULT_RATE}.")] = None
    rails: Annotated[
        int | None, typer.Option(min=1, help="On a testbed: rails of each host. Default: one for each rank.")
    ] = None

    @cached_property
    def layout(self) -> Layout | None:
        """The testbed, ``None`` without ``--testbed``; ``ValueError`` if options do not fit."""
        if self.testbed is None:
            for option, value in (("--rate", self.rate), ("--rails", self.rails)):
                if value is not None:
                    raise ValueError(f"{option} {value} goes with --testbed, such as --testbed 4x2")
            return None
        matched = _SHAPE.fullmatch(self.testbed)
        if not matched:
            raise ValueError(f"--testbed {self.testbed!r} is not a number of hosts and of ranks on each, such as 4x2")
        num_hosts, num_ranks = map(int, matched.groups())
        layout = Layout(num_hosts, self.rails or num_ranks, parse_rate(self.rate or _DEFAULT_RATE), num_ranks)
        if self.nodes not in (None, num_hosts) or self.ranks_per_node not in (None, num_ranks):
            raise ValueError(
                f"--testbed {num_hosts}x{num_ranks} already says how many nodes and ranks there are: leave out "
                f"--nodes and --ranks-per-node"
            )
        return layout

    @property
    def rank_gbs(self) -> float:
        """Rate of a rank's rails together in each direction, in 10^9 bytes per second; 0 without a testbed."""
        return len(self.layout.rails_of(0)) * self.layout.rate / 8e9 if self.layout else 0.0

    def topology(self, num_cpu_nodes: int = 2) -> Topology:
        """Return the nodes and ranks, without options ``num_cpu_nodes`` on the CPU; ``ValueError`` if they do not fit.

        On CUDA that includes too few GPUs, and no package that compiles kernels: nothing has been started yet.
        """
        from fusco.bench.ranks.torchrun import launched
        from fusco.core.requirements import check_cuda_core

        device, nodes, ranks_per_node = self.device, self.nodes, self.ranks_per_node
        if self.layout:
            nodes, ranks_per_node = self.layout.num_hosts, self.layout.ranks_per_host
        job = None if self.layout else launched()
        if device == "cpu" and not job:
            nodes = nodes or num_cpu_nodes
        nodes, ranks_per_node = choose_shape(device, nodes, ranks_per_node, job, num_devices(device))
        if device == "cuda":
            check_cuda_core()
        return Topology.of_equal_nodes(nodes * ranks_per_node, ranks_per_node)

    def run_there(self, prepare: Sequence[Callable[[], object]] = ()) -> None:
        """Run this command on all ranks of the testbed and exit; return on its ranks, and without a testbed.

        ``prepare`` are functions that compile kernels, called first, so that the ranks load them from disk.
        """
        if self.layout is None:
            return
        is_launched = "RANK" in os.environ
        if is_launched and any(re.fullmatch(r"rail\d+", name) for _, name in socket.if_nameindex()):
            return
        if is_launched:
            raise ValueError("--testbed starts its ranks itself: leave out torchrun")
        for each in prepare:
            each()
        command = [sys.executable, "-m", "fusco", *sys.argv[1:]]
        layout = self.layout
        with Testbed(layout.num_hosts, layout.num_rails, layout.rate, ranks_per_host=layout.ranks_per_host) as made:
            raise typer.Exit(run_job(made, command))


def run_testbed(
    command: Annotated[
        list[str] | None, typer.Argument(help="Command and its arguments, after --. Default: a shell on host 0.")
    ] = None,
    hosts: Annotated[int, typer.Option(min=1, help="How many hosts.")] = 2,
    rails: Annotated[int, typer.Option(min=1, help="Rails (NICs) of each host.")] = 1,
    rate: Annotated[str, typer.Option(help=f"{_RATE_HELP.capitalize()}.")] = _DEFAULT_RATE,
    ranks_per_host: Annotated[
        int, typer.Option(min=1, help="Processes on each host, each with its share of the rails.")
    ] = 1,
    mtu: Annotated[int, typer.Option(help="Largest packet, in bytes.")] = 9000,
) -> None:
    """Run a command on hosts with rate-limited NICs, made of network namespaces of this machine.

    The command is started on every host (with --ranks-per-host several times) with the variables of torchrun, so
    programs that use torch.distributed need no launcher: fusco testbed --hosts 4 --rate 500mbit -- python train.py

    It needs root or user namespaces, and the package pyroute2 (the extra testbed).
    Nothing is left behind, whatever ends this command.
    The exit code is that of the first process that fails.
    """
    with Testbed(hosts, rails, rate, ranks_per_host=ranks_per_host, mtu=mtu) as made:
        if command:
            raise typer.Exit(run_job(made, command))
        for host in range(hosts):
            typer.echo(f"host {host}: " + ", ".join(made.address(host, rail) for rail in range(rails)))
        other = made.namespaces(hosts - 1)
        user = f"--user={other.user} --preserve-credentials " if other.user else ""
        typer.echo(f"another shell, on host {hosts - 1}: nsenter {user}--net={other.network} --uts={other.names}")
        raise typer.Exit(exit_code(made.spawn(0, [os.environ.get("SHELL", "/bin/sh")]).wait()))
