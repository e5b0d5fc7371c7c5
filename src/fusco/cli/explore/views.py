"""The page, and its views, which are what its JSON contains. ``assets`` draws each kind; a test compares the two.

Every view has an anchor, the question that it answers, a title that says the finding, and a sentence on how to read it.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Literal

from fusco.core.files import written_beside

# In this order, in one script: what all views share, the views, and what puts them on the page.
STYLES = ("page.css", "views.css")
SCRIPTS = (
    "base.js",
    "drawing.js",
    "matrix.js",
    "loads.js",
    "experts.js",
    "time.js",
    "replay.js",
    "sweep.js",
    "results.js",
    "page.js",
)


@dataclass(frozen=True, kw_only=True)
class View:
    """What every view has. ``question`` is short, ``title`` is the finding, ``reading`` says what is drawn."""

    anchor: str
    question: str
    title: str
    reading: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar: rows, and what they are."""

    label: str
    rows: int


@dataclass(frozen=True, kw_only=True)
class CopiesView(View):
    """Rows between nodes: what a copy for each expert would send, what is sent, the bound."""

    kind: Literal["copies"] = field(default="copies", init=False)
    bars: list[Bar]
    tokens: int
    bytes_per_row: int


@dataclass(frozen=True, kw_only=True)
class MatrixView(View):
    """Rows from cell (down) to cell (across). A cell is a rank, a node, or ``nodes_per_cell`` consecutive nodes.

    ``before`` has a copy for each expert, ``after`` one for each node. ``ranks_before`` and ``ranks_after`` (R, cells)
    have the rows of each rank, or are empty where cells are ranks, or there are too many.
    """

    kind: Literal["matrix"] = field(default="matrix", init=False)
    cell: Literal["rank", "node"]
    nodes_per_cell: int
    ranks_per_node: int
    bytes_per_row: int
    before: list[list[int]]
    after: list[list[int]]
    ranks_before: list[list[int]] = field(default_factory=list)
    ranks_after: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class BalancerLoads:
    """Rows that each rank sends and receives (R,) with a balancer; lists are empty if they are not known.

    ``over_bound`` is the busiest rank's load over the bound; ``send_ratio`` and ``receive_ratio`` are the busiest
    sender's and receiver's.
    """

    name: str
    is_chosen: bool
    sends: list[int] = field(default_factory=list)
    receives: list[int] = field(default_factory=list)
    over_bound: float
    send_ratio: float
    receive_ratio: float
    moved_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class LinksView(View):
    """Loads of the links of all ranks, with each balancer; ``bound_rows`` is 0 if only ratios are known."""

    kind: Literal["links"] = field(default="links", init=False)
    ranks_per_node: int
    bytes_per_row: int
    bound_rows: float
    balancers: list[BalancerLoads]


@dataclass(frozen=True, kw_only=True)
class ExpertsView(View):
    """Rows that each rank computes by layer (L, R), without and with copies of busy experts in spare places.

    ``ratio_before`` and ``ratio_after`` (L,) are the busiest rank's rows over the mean. Rows may be empty.
    """

    kind: Literal["experts"] = field(default="experts", init=False)
    spare_places: int
    layers: list[int]
    before: list[list[int]]
    after: list[list[int]]
    ratio_before: list[float]
    ratio_after: list[float]
    copies: list[int]


@dataclass(frozen=True, kw_only=True)
class TimelineView(View):
    """Spans on lanes, as columns of equal length. ``of_kind`` and ``of_lane`` index ``kinds`` and ``lanes``.

    ``peer`` is the node or rank that a span's bytes go to, -1 for none. ``marks_us`` are the beginnings of stages.
    """

    kind: Literal["timeline"] = field(default="timeline", init=False)
    lanes: list[str]
    kinds: list[str]
    total_us: float
    bound_us: float
    marks_us: list[float] = field(default_factory=list)
    of_lane: list[int]
    of_kind: list[int]
    begin_us: list[float]
    end_us: list[float]
    peer: list[int]


@dataclass(frozen=True, kw_only=True)
class ReplayView(View):
    """Flows of constant rate, as columns of equal length, between ends that can each send and receive ``end_gbs``.

    Without flows, rates of each end in samples of ``step_us``: ``sends_gbs`` and ``receives_gbs`` (samples, ends).
    """

    kind: Literal["replay"] = field(default="replay", init=False)
    end: Literal["rank", "node"]
    num_ends: int
    end_gbs: float
    total_us: float
    src: list[int] = field(default_factory=list)
    dst: list[int] = field(default_factory=list)
    begin_us: list[float] = field(default_factory=list)
    end_us: list[float] = field(default_factory=list)
    gbs: list[float] = field(default_factory=list)
    step_us: float = 0.0
    sends_gbs: list[list[float]] = field(default_factory=list)
    receives_gbs: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One variant of a benchmark, or one simulated system. Times in ms; ``None`` if unknown.

    Bytes are those of rows between nodes in one dispatch. ``bound_ms`` is the time of the busiest link alone, of
    dispatch and combine together. ``note`` says more of the run, such as which link binds.
    """

    workload: str
    variant: str
    dispatch_ms: float
    combine_ms: float
    bound_ms: float | None
    internode_bytes: int | None
    lower_bound_bytes: int | None
    is_right: bool
    note: str


@dataclass(frozen=True, kw_only=True)
class RunsView(View):
    """Times of variants, measured, or of systems, simulated; ``machine`` says where."""

    kind: Literal["runs"] = field(default="runs", init=False)
    machine: str
    runs: list[Run]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Times of a system in ms, one for each place on the axis; ``None`` if unknown."""

    name: str
    ms: list[float | None]


@dataclass(frozen=True, kw_only=True)
class SweepView(View):
    """Times over what varies: ``places`` are numbers of ``axis``, ascending."""

    kind: Literal["sweep"] = field(default="sweep", init=False)
    axis: str
    places: list[float]
    series: list[Series]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One result, predicted and measured.

    ``role`` is ``"train"`` if constants were fitted to it, ``"none"`` if no constant explains it, else ``"test"``.
    """

    label: str
    role: Literal["train", "test", "none"]
    unit: str
    predicted: float
    measured: float


@dataclass(frozen=True, kw_only=True)
class PredictionsView(View):
    """Predicted beside measured results."""

    kind: Literal["predictions"] = field(default="predictions", init=False)
    rows: list[Prediction]


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant of a simulation, its source, and the published results that it was fitted to."""

    name: str
    value: float
    source: str
    trained: list[str]


@dataclass(frozen=True, kw_only=True)
class ConstantsView(View):
    """What a simulation was given."""

    kind: Literal["constants"] = field(default="constants", init=False)
    constants: list[Constant]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page.

    Attributes:
        title: what the page is about, its heading. subtitle: more of it, in a sentence, or empty.
        facts: short texts by label, such as the number of ranks.
        views: what is shown, in this order.
        origin: where the numbers come from, in a sentence at the end.
    """

    title: str
    subtitle: str
    facts: Mapping[str, str]
    views: Sequence[View]
    origin: str

    def to_html(self) -> str:
        """Return the whole file. ``ValueError`` without a view, or for a number that JSON lacks (NaN)."""
        if not self.views:
            raise ValueError(f"there is nothing to show of {self.title}")
        data = {
            "title": self.title,
            "subtitle": self.subtitle,
            "facts": dict(self.facts),
            "origin": self.origin,
            "views": [asdict(view) for view in self.views],
        }
        # Within a script element only "</script" and "<!--" end or change it.
        text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        parts = {
            "TITLE": html.escape(self.title),
            "STYLE": "\n".join(map(_asset, STYLES)),
            "DATA": text,
            "SCRIPT": "\n".join(map(_asset, SCRIPTS)),
        }
        return re.sub("%([A-Z]+)%", lambda place: parts[place[1]], _asset("page.html"))


def write_page(page: Page, path: Path) -> None:
    """Write the page; the file is complete or invisible."""
    text = page.to_html()
    with written_beside(path) as beside:
        beside.write_text(text, encoding="utf-8")


def _asset(name: str) -> str:
    return resources.files("fusco.cli.explore").joinpath("assets").joinpath(name).read_text(encoding="utf-8")
