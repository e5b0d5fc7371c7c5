"""Help of commands: options in groups, flags without a type, no limits that only a machine has, and an example each."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from fusco.cli.options import with_groups

# The group of each option in help; others are among "Options".
GROUPS = {
    "Workload": "traffic tokens num_experts num_topk trace trace_key layer seed hidden dtype batches skew matrix loads "
    "bytes_per_rank expert_bytes context model layers routing sweep_tokens",
    "Training": "preset steps length lr warmup_steps text text_bytes architecture moe_intermediate router_loss dropout "
    "activation_checkpointing balance_rate",
    "Ranks and network": "device nodes ranks_per_node testbed rate rails num_rails ranks hosts ranks_per_host "
    "timeout_s cluster num_sms slice_bytes ring_depth slice_order latency_us internode_gbs link_gbs ep_size mtu",
    "Output": "json html timeline out export plot metrics measure save save_every keep_last resume record_trace "
    "eval_every sample_tokens",
}
_OPTION_TO_GROUP = {option: group for group, options in GROUPS.items() for option in options.split()}
EXAMPLES = {
    "plan": "fusco plan --nodes 4 --traffic zipf",
    "schedule": "fusco schedule --nodes 4 --matrix zipf",
    "simulate": "fusco simulate --cluster h100x8 --nodes 2,8,32 --traffic skewed",
    "explore": "fusco explore --nodes 4 -o plan.html",
    "train": "fusco train --steps 50 --save out/run --save-every 10",
    "rails": "fusco rails --once",
    "doctor": "fusco doctor",
    "warm-up": "fusco warm-up --arch sm_90",
    "integrations": "fusco integrations --path deep_ep",
    "testbed": "fusco testbed --hosts 2 -- python examples/moe_layer.py",
    "bench shuffle": "fusco bench shuffle --nodes 4 --traffic trace,zipf --json out.jsonl",
    "bench alltoall": "fusco bench alltoall --nodes 4 --matrix random",
    "bench schedule": "fusco bench schedule --nodes 8 --draws 10",
    "bench host": "fusco bench host --tokens 128",
    "bench prefill": "fusco bench prefill --variants fusco,baseline",
    "bench decode": "fusco bench decode --tokens 1,16",
    "bench rails": "fusco bench rails --rails 4",
    "bench offload": "fusco bench offload",
    "bench balancers": "fusco bench balancers --draws 100",
    "bench balance": "fusco bench balance --ranks 8,16 --spare-places 2",
}
_OF_A_MACHINE = 1024  # limits from here on say what a machine can hold, and are not shown


class _Plain:
    """A command, or group of them, whose flags are shown without a type."""

    def get_params(self, ctx: Any) -> Any:
        """Return the options."""
        parameters = super().get_params(ctx)  # type: ignore[misc]  # of typer's class beside this one
        for each in parameters:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return parameters


class _Command(_Plain, TyperCommand):
    pass


class CommandGroup(_Plain, TyperGroup):
    """A group of commands whose flags are shown without a type."""


def add_commands(app: typer.Typer, commands: Sequence[Callable[..., None]], prefix: str = "") -> None:
    """Add commands with their help; ``prefix`` is the name of their group, such as ``"bench "``."""
    for command in commands:
        name = str(command.__name__).removeprefix("run_").replace("_", "-")
        app.command(name, cls=_Command, epilog=f"Example: `{EXAMPLES[prefix + name]}`")(_with_help(command))


def _with_help(command: Callable[..., None]) -> Callable[..., None]:
    tidy = with_groups(command)
    parameters = [_tidy(each) for each in inspect.signature(tidy).parameters.values()]
    tidy.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    tidy.__annotations__ = {each.name: each.annotation for each in parameters}
    return tidy


def _tidy(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a command's parameter with its option in a group, and shown as people read it."""
    if get_origin(parameter.annotation) is not Annotated:
        return parameter
    kind, *notes = get_args(parameter.annotation)
    tidy = (kind, *(_tidy_option(each, parameter.name) for each in notes))
    return parameter.replace(annotation=Annotated[tidy])


def _tidy_option(note: Any, name: str) -> Any:
    if not isinstance(note, OptionInfo):
        return note
    option = copy.copy(note)
    option.rich_help_panel = option.rich_help_panel or _OPTION_TO_GROUP.get(name)
    if option.max is not None and option.max >= _OF_A_MACHINE and option.callback is None:
        option.callback, option.max = _at_most(option.max), None
    return option


def _at_most(limit: float) -> Callable[[Any], Any]:
    """Return a callback that refuses a value, or one of several, above a limit."""

    def check(value: Any) -> Any:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if each is not None and each > limit:
                raise typer.BadParameter(f"{each} is more than {limit:,}")
        return value

    return check
