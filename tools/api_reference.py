"""Write docs/api.md: every public name of fusco with its signature and docstring, grouped by topic.

Sources are parsed, not imported, so the page does not depend on the installed versions of Python and PyTorch.
Public are the names that a package's ``__init__.py`` imports as themselves. ``--check`` compares and writes nothing.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
OPENING = """# API reference

Made by `make docs` from the docstrings. Only names on this page are public, importable from `fusco`, `fusco.fsdp`,
`fusco.offload`, `fusco.placement`, `fusco.rails`, `fusco.schedule` and `fusco.testbed`; modules below them may move.
[Design](design.md), [errors](faults.md), [training](fsdp.md), [rails](rails.md), [testbed](testbed.md)."""
# All names of each package, by topic, in the order of the page; a name that is missing here is an error.
TOPICS: dict[str, dict[str, str]] = {
    "fusco": {
        "Communicate": "Communicator Dispatched Handle StaticRows Launch Segments Timeline",
        "Without a communicator": "all_to_all move_experts",
        "Experts that move": "MoveTask Pace",
        "Settings and memory": "Settings Capacity memory_size_hint MemorySize",
        "Ranks, nodes and experts": "Topology ExpertPlacement",
        "Forwarding": "Balancer BALANCERS Traffic Groups Lanes Runs",
        "Errors": "FuscoError PeerFailureError ExcludedError MismatchError RejectedInputError RowOverflowError "
        "ClosedError ThreadError SharedMemoryError OutputMemoryError TransportError CompileError LaunchError",
    },
    "fusco.fsdp": {
        "Distribute a model": "build_mesh EPMesh parallelize Sharding find_experts Experts SHUFFLE_OPS",
        "Dispatchers": "Dispatcher FuscoDispatcher TorchDispatcher Arrival TimedDispatcher BalancedDispatcher",
        "A training step": "scale_loss global_sum clip_grad_norm_ grad_norm",
        "Checkpoints and files": "save_checkpoint load_checkpoint save_hugging_face load_hugging_face "
        "parameters_on_meta materialize",
        "State of a run": "save_run load_run latest_run AsyncSaver RunState HasState",
        "Balance of experts": "expert_loads reset_expert_loads summarize_loads LoadSummary update_expert_bias",
        "Measured steps": "Metrics StepMetrics MetricWriter MetricPrinter JsonLinesWriter CsvWriter TensorBoardWriter "
        "WandbWriter",
        "Through transformers": "registered_with_transformers registered_as_experts_implementation",
    },
    "fusco.offload": {
        "Copies": "copy_to_host copy_from_host Copy",
        "Activations": "offload_activations",
        "Copiers": "Copier copier_of OffloadSettings RelayBudget",
    },
    "fusco.rails": {
        "Endpoints and messages": "Endpoint Channel Request Address",
        "Rails of a host": "Rail discover_rails",
        "NCCL": "nccl_plugin",
        "Scheduling": "POLICIES Policy Limits",
    },
    "fusco.placement": {
        "Plans": "plan_batch Balance BatchPlan plan_placement PlannedPlacement plan_moves MovePlan",
    },
    "fusco.schedule": {
        "Between nodes": "decompose Stages lower_bound_bytes spread_out",
        "Schedules": "make_schedule Schedule Transfers check_schedule find_faults warm_up",
        "Time by a model of the links": "Links choose_mode schedule_us stages_us",
    },
    "fusco.testbed": {
        "Hosts and their network": "Testbed Layout RailCounters parse_rate TestbedError",
        "Processes on hosts": "run_job Namespaces",
        "Classes of traffic": "BORROWED_PRIORITY BORROWED_TOS",
    },
}
# Sections of docstrings and their titles on the page; properties become a section of their class.
SECTIONS = {"Args": "Arguments"} | {name: name for name in ("Attributes", "Properties", "Returns", "Yields", "Raises")}


UNLISTED = ("fusco", "fusco.core.version")  # their names have no entries


class Entry(NamedTuple):
    """One heading of the page; ``code`` is a definition without its body, ``doc`` its docstring."""

    name: str
    code: str
    doc: str


def source_of(module: str) -> str:
    """Return the text of a module or package."""
    path = ROOT.joinpath("src", *module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def exports(package: str) -> dict[str, str]:
    """Return the public names of a package and the module that defines each, without modules and the version."""
    imports = [node for node in ast.walk(ast.parse(source_of(package))) if isinstance(node, ast.ImportFrom)]
    return {a.name: str(i.module) for i in imports for a in i.names if a.asname == a.name and i.module not in UNLISTED}


def with_inherited(source: str) -> str:
    """Return the text of a module whose classes have the members of their bases that are imported and not public."""
    lines, tree = source.splitlines(), ast.parse(source)
    imported = {a.name: i.module for i in tree.body if isinstance(i, ast.ImportFrom) for a in i.names}
    for node in reversed([node for node in tree.body if isinstance(node, ast.ClassDef)]):
        base = ast.unparse(node.bases[0]) if node.bases else ""
        module = imported.get(base) or ""
        if module.startswith("fusco.") and base not in exports("fusco"):
            text = with_inherited(source_of(module))
            (found,) = (each for each in ast.parse(text).body if isinstance(each, ast.ClassDef) and each.name == base)
            lines[node.end_lineno : node.end_lineno] = text.splitlines()[found.body[0].end_lineno : found.end_lineno]
            lines[node.lineno - 1] = lines[node.lineno - 1].replace(f"({base})", "")
    return "\n".join(lines)


def entries(name: str, source: str) -> Iterator[Entry]:
    """Yield the entry of a module's name and, for a class, of each of its public methods."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if isinstance(node, ast.FunctionDef) and node.name == name:
            yield Entry(name, head(node, lines), docstring(node))
        elif isinstance(node, ast.ClassDef) and node.name == name:
            yield from class_entries(node, lines)
        elif name in map(ast.unparse, targets):
            above = itertools.takewhile(lambda line: line.startswith("#"), reversed(lines[: node.lineno - 1]))
            doc = "\n".join(line.lstrip("#: ") for line in reversed(list(above)))
            yield Entry(name, "\n".join(map(without_noqa, lines[node.lineno - 1 : node.end_lineno])), doc)


def class_entries(node: ast.ClassDef, lines: list[str]) -> Iterator[Entry]:
    """Yield the entry of a class, with its constructor or fields and its properties, then those of its methods."""
    members = [member for member in node.body if isinstance(member, ast.FunctionDef)]
    annotated = [field for field in node.body if isinstance(field, ast.AnnAssign) and "dataclass" in head(node, lines)]
    fields = [line for field in annotated for line in lines[field.lineno - 1 : field.end_lineno]]
    inits = [member for member in members if member.name == "__init__"]
    public = [member for member in members if not member.name.startswith("_")]
    properties = [member for member in public if "property" in head(member, lines).split("def ")[0]]
    parts = [docstring(node), *map(docstring, inits)]
    if properties:
        listed = [f"{member.name}: {docstring(member)}".replace("\n", "\n    ") for member in properties]
        parts.append("Properties:\n" + textwrap.indent("\n".join(listed), "    "))
    body = [*fields, *(textwrap.indent(head(init, lines), "    ") for init in inits)]
    code = "\n".join([head(node, lines) + ":" * bool(body), *(without_noqa(line) for line in body)])
    yield Entry(node.name, code, "\n\n".join(parts))
    for member in public:
        if member not in properties:
            yield Entry(f"{node.name}.{member.name}", head(member, lines), docstring(member))


def docstring(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Return the docstring of a definition; empty if there is none."""
    return ast.get_docstring(node) or ""


def head(node: ast.FunctionDef | ast.ClassDef, lines: list[str]) -> str:
    """Return the lines of a definition before its body, as they are in the source, with decorators that callers see."""
    decorators = [each for each in node.decorator_list if ast.unparse(each) != "uncompiled"]
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    above_body = lines[first - 1 : max(node.body[0].lineno - 1, first)]
    return textwrap.dedent("\n".join(map(without_noqa, above_body))).removesuffix(" ...").removesuffix(":")


def without_noqa(line: str) -> str:
    """Return a line without what it says to linters."""
    return re.sub(r"  # (noqa|type: ignore).*", "", line)


def markdown(doc: str) -> str:
    """Return a docstring as Markdown: sections become lists, doctests become code."""
    doc = re.sub(r"::$", ":", doc.replace("``", "`"), flags=re.MULTILINE)
    doc = re.sub(r"^>>> (?:.|\n(?!\n|\Z))*", lambda example: f"```pycon\n{example[0]}\n```", doc, flags=re.MULTILINE)
    for section, title in SECTIONS.items():
        heading, body = f"**{title}**\n\n", rf"^{section}:\n((?:    .*\n?|\n(?=    ))+)"
        doc = re.sub(body, lambda match, heading=heading: heading + as_list(match[1]), doc, flags=re.MULTILINE)  # type: ignore[misc]
    return re.sub(r"\n{3,}", "\n\n", doc.strip())


def as_list(body: str) -> str:
    """Return the lines of a section: ``name: text`` as items of a list, other text as it is."""
    text = re.sub(r"^((?:[*\w]+(?:, )?)+): ", r"- `\1`: ", textwrap.dedent(body), flags=re.MULTILINE)
    return re.sub(r"^ {4}", "  ", text, flags=re.MULTILINE) + "\n"


def page() -> str:
    """Return the text of docs/api.md; ``ValueError`` for public names without a topic, or topics of other names."""
    parts = [OPENING, contents()]
    for package, topics in TOPICS.items():
        found = exports(package)
        if set(found) != set(names := " ".join(topics.values()).split()):
            raise ValueError(f"TOPICS and the public names of {package} differ: {sorted(set(found) ^ set(names))}")
        about = ast.get_docstring(ast.parse(source_of(package))) or ""
        parts += [f"## {package}", *([] if package == "fusco" else [markdown(about)])]
        for topic, names_of_topic in topics.items():
            parts.append(f"### {topic}")
            for name in names_of_topic.split():
                for entry in entries(name, with_inherited(source_of(found[name]))):
                    parts.append(f"#### `{entry.name}`\n\n```python\n{entry.code}\n```")
                    parts.append(markdown(entry.doc))
    return "\n\n".join(part for part in parts if part) + "\n"


def contents() -> str:
    """Return a table of all names, with links."""
    rows = ["| package | topic | names |", "| --- | --- | --- |"]
    for package, topics in TOPICS.items():
        for topic, names in topics.items():
            links = ", ".join(f"[`{name}`](#{name.lower()})" for name in names.split())
            rows.append(f"| `{package}` | {topic} | {links} |")
    return "\n".join(rows)


def main() -> int:
    """Write the page; with ``--check``, return 1 if it is not up to date."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
    return int(PAGE.read_text() != text)


if __name__ == "__main__":
    sys.exit(main())
