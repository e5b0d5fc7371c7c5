"""``python -m attack``: run attacks until the time is up or one finds a fault; the last line says how to repeat it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

from rich.console import Console
from rich.table import Table

from attack.kinds import Attacks
from fusco.bench.ranks.local_world import PRELOADED

# Share of the time that each kind gets.
_SHARES = {"random": 0.35, "soak": 0.15, "faults": 0.2, "clients": 0.05, "peers": 0.07, "addresses": 0.03}
_SHARES |= {"shim": 0.05, "saves": 0.05, "moves": 0.05, "survivors": 0.2, "rejoins": 0.05, "throughput": 0.05}


def main() -> int:
    """Run attacks; the exit code is 1 if one found a fault."""
    options = parse()
    PRELOADED.extend(["compiled_kernels", "attack.serving"])
    forkserver.set_forkserver_preload(PRELOADED)
    console = Console(highlight=False, soft_wrap=True, markup=False)  # errors have brackets
    attacks = Attacks(options.seed, options.device, options.json)
    spent, done = dict.fromkeys(options.only, 0.0), dict.fromkeys(options.only, 0)
    began = time.monotonic()
    failure = ""
    try:
        while not failure and time.monotonic() - began < options.seconds:
            kind = min(options.only, key=lambda kind: (spent[kind] / _SHARES[kind], kind))
            number = done[kind] if options.index is None else options.index
            failure = _attack(console, attacks, kind, number, began, options.seed)
            done[kind] += 1
            spent[kind] = spent[kind] + time.monotonic() - began - sum(spent.values())
            if options.index is not None:
                break
    finally:
        attacks.close()
    table = Table("attack", "cases", "seconds", "result")
    for kind in options.only:
        is_failed = bool(failure) and failure.split()[0] == kind
        table.add_row(kind, str(done[kind]), f"{spent[kind]:.0f}", "FAILED" if is_failed else "passed")
    console.print(table)
    if attacks.strikes.counts:
        console.print(f"survivors: {attacks.strikes}")
    if failure:
        kind, number = failure.split()
        console.print(f"repeat it: python -m attack --only {kind} --seed {options.seed} --index {number}")
    return bool(failure)


def _attack(console: Console, attacks: Attacks, kind: str, number: int, began: float, seed: int) -> str:
    """Run one attack; return its name if it found a fault, and ``""`` otherwise."""
    try:
        summary = attacks.kinds[kind](number)
    except Exception as error:  # noqa: BLE001  any error is a finding
        console.print(f"{time.monotonic() - began:6.1f} s  {kind} {number} FAILED: {type(error).__name__}: {error}")
        return f"{kind} {number}"
    console.print(f"{time.monotonic() - began:6.1f} s  {kind} {number}: {summary}")
    return ""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(prog="python -m attack", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="start no attack after this time (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers (default: 0)")
    parser.add_argument(
        "--only", type=_kinds, default=list(_SHARES), help=f"kinds, separated by commas: {', '.join(_SHARES)}"
    )
    parser.add_argument("--index", type=int, help="run only the attack with this number, of each kind")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: of survivors only")
    parser.add_argument("--json", type=Path, help="file that gets a line for each strike of survivors")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and [*chosen.only] != ["survivors"]:
        parser.error("--device cuda goes with --only survivors")
    return chosen


def _kinds(text: str) -> Sequence[str]:
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in _SHARES]:
        raise argparse.ArgumentTypeError(f"no such kind: {', '.join(unknown)}")
    return kinds


if __name__ == "__main__":
    sys.exit(main())
