"""Draw the pictures of the pages: those that explain words, and plots of the results in docs/data.

python tools/figures.py [FOLDER]    # docs/figures
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data"
BLUE, ORANGE, GREEN, GREY, DARK = "#3b78b5", "#d9822b", "#4a9a62", "#c4c8cd", "#30363d"
COLORS = {"fusco": BLUE, "DeepEP 2.1": ORANGE, "NCCL": GREY}


@contextmanager
def picture(folder: Path, name: str, width: float, height: float) -> Iterator[Axes]:
    """Give axes without frame, in units of a tenth of an inch from the lower left; save them as an SVG file."""
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set(xlim=(0, width * 10), ylim=(0, height * 10))
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    yield axes
    save(figure, folder / f"{name}.svg")


def save(figure: Any, path: Path) -> None:
    """Write a figure with a white ground, readable on dark pages, and without a date."""
    figure.savefig(path, facecolor="white", metadata={"Date": None, "Creator": None})
    plt.close(figure)


def box(axes: Axes, x: float, y: float, width: float, height: float, color: str = "white", text: str = "") -> None:
    """Draw a box with a text in its middle."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=DARK, linewidth=0.8))
    ink = "white" if color in (BLUE, ORANGE, GREEN) else DARK
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, fontsize=8)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = DARK) -> None:
    """Draw an arrow."""
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=color, linewidth=1.1))


def note(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write a text."""
    axes.text(x, y, text, **{"fontsize": 8, "color": DARK, "va": "center", **style})


def dispatch(folder: Path) -> None:
    """Tokens of two ranks go to two experts each, and arrive in blocks."""
    with picture(folder, "words-dispatch", 7.2, 3.0) as axes:
        note(axes, 2, 28, "tokens, where they are", weight="bold")
        note(axes, 50, 28, "rows, expert-major", weight="bold")
        experts = {"A": (0, 2), "B": (0, 1), "C": (2, 3), "D": (1, 2)}
        where: dict[tuple[str, int], float] = {}
        order = [(token, expert) for expert in range(4) for token in "ABCD" if expert in experts[token]]
        y = 24.5
        for token, expert in order:
            y -= 2.4 + (1.2 if expert != order[max(0, order.index((token, expert)) - 1)][1] else 0)
            where[token, expert] = y
            box(axes, 50, y, 8, 2.2, (BLUE, ORANGE, GREEN, GREY)[expert], token)
        for expert in range(4):
            ys = [y for (_, of), y in where.items() if of == expert]
            note(axes, 59, sum(ys) / len(ys) + 1.1, f"expert {expert}, rank {expert // 2}")
        for number, token in enumerate("ABCD"):
            y = 22 - 5.4 * number
            box(axes, 12, y, 8, 2.2, text=token)
            note(axes, 1, y + 1.1, f"rank {number // 2}")
            for expert in experts[token]:
                color = (BLUE, ORANGE, GREEN, DARK)[expert]
                arrow(axes, (20.3, y + 1.1), (49.6, where[token, expert] + 1.1), color)


def forwarder(folder: Path) -> None:
    """A token with three experts on another node crosses once."""
    with picture(folder, "words-forwarder", 7.2, 2.6) as axes:
        for x, name in ((1, "node 0"), (34, "node 1")):
            axes.add_patch(Rectangle((x, 1), 22 if x == 1 else 37, 22, fill=False, edgecolor=GREY, linestyle="--"))
            note(axes, x + 1, 21.3, name)
        box(axes, 6, 10, 12, 3, BLUE, "token")
        arrow(axes, (18.4, 11.5), (37.6, 11.5), BLUE)
        note(axes, 23.6, 13, "network:\none copy", va="bottom")
        box(axes, 38, 10, 11, 3, BLUE, "forwarder")
        for number, y in enumerate((16, 10, 4)):
            box(axes, 57, y, 12, 3, GREEN, f"expert {number + 4}")
            arrow(axes, (49.4, 11.5), (56.6, y + 1.5), GREEN)
        note(axes, 37, 3.5, "memory of the node:\na copy for each expert")


def bars(axes: Axes, x: float, heights: list[float], level: float, title: str, word: str) -> None:
    """Draw bars of four ranks with a line at ``level``."""
    note(axes, x, 24, title, weight="bold")
    for number, height in enumerate(heights):
        color = ORANGE if height == max(heights) and height > level * 1.05 else BLUE
        box(axes, x + 6 * number, 2.5, 4.5, height, color)
        note(axes, x + 6 * number + 2.2, 1, str(number), ha="center")
    axes.plot([x - 1, x + 24], [2.5 + level] * 2, color=DARK, linestyle=":", linewidth=1)
    note(axes, x + 24.5, 2.5 + level, word)


def lanes(folder: Path) -> None:
    """Loads of NICs before and after balancing."""
    with picture(folder, "words-lanes", 7.2, 2.6) as axes:
        bars(axes, 2, [18, 7, 9, 6], 10, "bytes of each NIC, without", "bound")
        bars(axes, 38, [10.1, 10, 9.9, 10], 10, "with lanes", "bound")


def replicas(folder: Path) -> None:
    """Rows of ranks before and after replicas of the busiest experts."""
    with picture(folder, "words-replicas", 7.2, 2.6) as axes:
        bars(axes, 2, [19, 8, 7, 6], 10, "rows of each rank", "mean")
        bars(axes, 38, [10, 10, 10.2, 9.8], 10, "with two spare places", "mean")


def static(folder: Path) -> None:
    """Three ways to size an output."""
    with picture(folder, "words-static", 7.2, 2.6) as axes:
        sizes = (3, 1, 2)
        colors = (BLUE, ORANGE, GREEN)
        for y, title in ((18, "exactly sized"), (10.5, "static rows"), (3, "masked")):
            note(axes, 1, y + 1.5, title)
            x = 16.0
            for size, color in zip(sizes, colors, strict=True):
                for _ in range(size):
                    box(axes, x, y, 4.2, 3, color)
                    x += 4.2
                if title == "masked":
                    for _ in range(4 - size):
                        box(axes, x, y, 4.2, 3)
                        x += 4.2
            while title == "static rows" and x < 16 + 4.2 * 9:
                box(axes, x, y, 4.2, 3)
                x += 4.2


def slices(folder: Path) -> None:
    """Three slices of a dispatch: pack, send, scatter."""
    with picture(folder, "words-slices", 7.2, 2.2) as axes:
        for row, (title, color) in enumerate((("pack", BLUE), ("network", ORANGE), ("scatter", GREEN))):
            y = 15 - 6 * row
            note(axes, 1, y + 1.6, title)
            for number in range(4):
                box(axes, (11, 17, 29)[row] + 12 * number, y, 11 if row == 1 else 5, 3.2, color, f"slice {number}")
        arrow(axes, (11, 0.8), (70, 0.8))
        note(axes, 66, 2, "time")


def records(name: str) -> list[dict[str, Any]]:
    """Return the records of a file in docs/data, without its first line, which says where they are from."""
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()][1:]


def plot(**labels: Any) -> tuple[Any, Axes]:
    """Return a figure and its axes, with labels."""
    figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    axes.set(**labels)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def time_over_tokens(folder: Path) -> None:
    """Time of a dispatch and a combine over tokens, and the bytes that cross in it, with the link's peak."""
    figure, (axes, rates) = plt.subplots(1, 2, figsize=(7.2, 3.8), layout="constrained")
    axes.set(xlabel="tokens per rank", ylabel="dispatch + combine, ms", xscale="log", yscale="log")
    rates.set(xlabel="tokens per rank", ylabel="GB/s of a rank, each way", xscale="log", ylim=(0, LINK_GBS * 1.05))
    points = [each for each in records("bench-gpu-2h100") if each["part"].startswith("h7168")]
    for library, names in VARIANTS.items():
        for (mode, field), style, name in zip(MODES.items(), ("o-", "s--"), names, strict=True):
            chosen = [each for each in points if each["variant"] == name]
            if chosen:
                x, y = [each["tokens"] for each in chosen], [each[field] for each in chosen]
                axes.plot(x, y, style, color=COLORS[library], label=f"{library}, {mode}", markersize=4)
                gbs = [megabytes(count) / ms for count, ms in zip(x, y, strict=True)]
                rates.plot(x, gbs, style, color=COLORS[library], markersize=4)
    tokens = sorted({each["tokens"] for each in points})
    axes.plot(tokens, [megabytes(count) / LINK_GBS for count in tokens], ":", color=DARK, label="link at its peak")
    rates.axhline(LINK_GBS, linestyle=":", color=DARK)
    plain_ticks(axes, tokens, [0.01, 0.1, 1, 10])
    plain_ticks(rates, tokens, [0, 100, 200, 300, 400])
    for each in (axes, rates):
        each.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, ncols=3, loc="outside upper center")
    save(figure, folder / "time-over-tokens.svg")


def megabytes(tokens: int) -> float:
    """Return the MB that a rank sends to the other one in a dispatch and a combine of so many bfloat16 tokens."""
    return 2 * tokens * 7168 * 2 * SHARE_CROSSING / 1e6


def plain_ticks(axes: Axes, x: list[int], y: list[float]) -> None:
    """Label logarithmic axes at these values, without powers."""
    axes.set_xticks(x, [f"{each // 1024} Ki" if each >= 1024 else f"{each}" for each in x])
    axes.set_yticks(y, [f"{each:g}" for each in y])
    axes.minorticks_off()


LINK_GBS = 378.0  # the mean of pulling (370) and pushing (388) by the copy engine, two H100 (docs/performance/cuda.md)
# Of a library, the variants of ``fusco bench shuffle`` in a graph and in a row; of a mode, the field of a record.
VARIANTS = {
    "NCCL": ("", "baseline"),
    "DeepEP 2.1": ("deep_ep_v2-graph", "deep_ep_v2"),
    "fusco": ("fusco-graph", "fusco"),
}
MODES = {"graph": "total_ms", "in a row": "loop_ms"}
SHARE_CROSSING = 0.9966  # of tokens with an expert on the other of two ranks: 1 - (1/2)**8, less repeats


def busiest_nic(folder: Path) -> None:
    """Busiest NIC over the bound by balancer and cluster."""
    found = records("balancers")
    figure, axes = plot(ylabel="busiest NIC / bound")
    places = sorted({(each["nodes"], each["ranks_per_node"]) for each in found})
    names = list(dict.fromkeys(each["balancer"] for each in found))
    for number, name in enumerate(names):
        by_place = {
            (each["nodes"], each["ranks_per_node"]): each["busiest_ratio"] for each in found if each["balancer"] == name
        }
        x = [index + (number - len(names) / 2 + 0.5) * 0.8 / len(names) for index in range(len(places))]
        axes.bar(x, [by_place[place] for place in places], 0.75 / len(names), label=name)
    axes.set_xticks(range(len(places)), [f"{nodes} x {ranks}" for nodes, ranks in places])
    axes.set_ylim(0.9)
    axes.axhline(1, color=DARK, linestyle=":", linewidth=1)
    axes.legend(frameon=False, fontsize=8)
    save(figure, folder / "busiest-nic.svg")


def cost_over_nodes(folder: Path) -> None:
    """Predicted time of a dispatch over nodes, by system."""
    found = records("simulated-nodes")
    figure, axes = plot(xlabel="ranks", ylabel="dispatch + combine, ms (predicted)", xscale="log", yscale="log")
    for system in dict.fromkeys(each["system"] for each in found):
        chosen = [each for each in found if each["system"] == system]
        axes.plot([each["ranks"] for each in chosen], [each["ms"] for each in chosen], "o-", label=system, markersize=4)
    plain_ticks(axes, sorted({each["ranks"] for each in found}), [5, 10, 20, 50])
    axes.legend(frameon=False, fontsize=8)
    save(figure, folder / "cost-over-nodes.svg")


def stacked(axes: Axes, names: list[str], parts: dict[str, list[float]]) -> None:
    """Draw a horizontal bar for each name, stacked of its parts in ms, with the sum at its end."""
    left, colors = [0.0] * len(names), (BLUE, ORANGE, "#7fb0dd", "#f0b97a")
    for (part, widths), color in zip(parts.items(), (*colors[: len(parts) - 1], GREY), strict=True):
        axes.barh(names, widths, left=left, color=color, label=part, height=0.6)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.1f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(left) * 1.1)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))


def training_step(folder: Path) -> None:
    """A step of training, by what it spends."""
    found = records("training-step")
    figure, axes = plot(xlabel="ms of a step")
    names = ("dispatch", "combine", "dispatch, backward", "combine, backward")
    parts = {name: [each[f"{name} ms"] for each in found] for name in names}
    parts["all else"] = [each["step_ms"] - sum(each[f"{name} ms"] for name in names) for each in found]
    stacked(axes, [each["dispatcher"] for each in found], parts)
    save(figure, folder / "training-step.svg")


def prefill(folder: Path) -> None:
    """A prefill, by what it spends."""
    found = records("prefill-parts")
    figure, axes = plot(xlabel="ms of a prefill, 24 layers")
    parts = {
        name: [each["layers"] * each[f"{name}_ms_per_layer"] for each in found] for name in ("dispatch", "combine")
    }
    moved = [sum(both) for both in zip(*parts.values(), strict=True)]
    parts["all else"] = [each["prefill_ms"] - part for each, part in zip(found, moved, strict=True)]
    stacked(axes, [each["variant"] for each in found], parts)
    save(figure, folder / "prefill-parts.svg")


def victims(folder: Path) -> None:
    """Latency of a victim's messages, by what borrows its rail."""
    found = records("victims")
    figure, both = plt.subplots(1, 2, figsize=(7.2, 3.0), layout="constrained")
    for axes, victim in zip(both, dict.fromkeys(each["victim"] for each in found), strict=True):
        chosen = [each for each in found if each["victim"] == victim]
        for offset, key, color in ((-0.2, "mean_ms", BLUE), (0.2, "p99_ms", ORANGE)):
            places = [place + offset for place in range(len(chosen))]
            axes.bar(places, [each[key] for each in chosen], 0.38, color=color, label=key.split("_")[0])
        axes.set_xticks(range(len(chosen)), [each["policy"].replace("-", "-\n") for each in chosen], fontsize=8)
        axes.set_title(f"victim: {victim}", fontsize=9)
        axes.set_ylabel("ms of a message")
        axes.spines[["top", "right"]].set_visible(False)
    both[0].legend(frameon=False, fontsize=8)
    save(figure, folder / "victims.svg")


def speedup_by_skew(folder: Path) -> None:
    """What lanes and borrowed rails gain, by skew."""
    found = records("speedup-by-skew")
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.0), layout="constrained", width_ratios=(3, 2))
    lanes_of = [each for each in found if each["of"] == "lanes"]
    left.barh([each["traffic"] for each in lanes_of], [each["speedup"] for each in lanes_of], color=BLUE, height=0.6)
    left.invert_yaxis()
    left.axvline(1, color=DARK, linestyle=":", linewidth=1)
    left.set_xlabel("time without / with lanes")
    rails = [each for each in found if each["of"] == "rails"]
    ratios = [each["direct_ms"] / each["fuselink_ms"] for each in rails]
    right.bar([f"Zipf {each['zipf']:g}" for each in rails], ratios, color=GREEN, width=0.6)
    right.axhline(1, color=DARK, linestyle=":", linewidth=1)
    right.set_ylabel("time without / with borrowed rails")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, folder / "speedup-by-skew.svg")


PICTURES = (dispatch, forwarder, lanes, replicas, static, slices)
PLOTS = (time_over_tokens, busiest_nic, cost_over_nodes, training_step, prefill, victims, speedup_by_skew)


def main() -> None:
    """Draw everything."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "figures"
    mpl.rcParams.update({"svg.hashsalt": "fusco", "svg.fonttype": "none", "font.family": "sans-serif"})
    for draw in (*PICTURES, *PLOTS):
        draw(folder)


if __name__ == "__main__":
    main()
