"""Curves of losses: of characters, for a terminal, and as a picture (SVG)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import fmean

from fusco.core.files import written_beside

Curve = Sequence[tuple[float, float]]  # (step, loss), in order of steps
_MARKS = "•o+x"
_MARGIN = 8  # columns for the numbers on the left
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 720, 360, 56, 36, 40  # of the picture, in pixels


def draw_curves(name_to_curve: Mapping[str, Curve], width: int, height: int = 10) -> str:
    """Return curves as lines of text of at most ``width`` columns; a column has the mean of its steps.

    >>> print(draw_curves({"loss": [(1, 4.0), (2, 3.0), (3, 2.0)]}, width=14, height=3))
      4.00 ┤•
      3.00 ┤  •
      2.00 ┤    •
           └─────
            1   3
    • loss
    """
    (first, last), (lowest, highest) = _ranges(name_to_curve)
    num_columns = max(2, min(width - _MARGIN - 1, 2 * int(last - first) + 1))
    rows = [[" "] * num_columns for _ in range(height)]
    for mark, curve in zip(_MARKS, name_to_curve.values(), strict=False):
        of_column: dict[int, list[float]] = {}
        for step, loss in curve:
            of_column.setdefault(round((step - first) / (last - first) * (num_columns - 1)), []).append(loss)
        for column, losses in of_column.items():
            nearest = round((highest - fmean(losses)) / (highest - lowest) * (height - 1))
            rows[nearest][column] = mark
    lines = []
    for index, cells in enumerate(rows):
        value = highest - index / (height - 1) * (highest - lowest)
        lines.append(f"{value:6.2f} ┤{''.join(cells)}".rstrip())
    ends = f"{first:g}", f"{last:g}"
    lines.append(" " * (_MARGIN - 1) + "└" + "─" * num_columns)
    lines.append(" " * _MARGIN + ends[0] + ends[1].rjust(num_columns - len(ends[0])))
    lines.append(", ".join(f"{mark} {name}" for mark, name in zip(_MARKS, name_to_curve, strict=False)))
    return "\n".join(lines)


def write_picture(path: Path, name_to_curve: Mapping[str, Curve], title: str) -> None:
    """Write curves as a picture in SVG."""
    (first, last), (lowest, highest) = _ranges(name_to_curve)

    def at(step: float, loss: float) -> tuple[float, float]:
        x = _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - 16)
        return round(x, 1), round(_TOP + (highest - loss) / (highest - lowest) * (_HEIGHT - _TOP - _BOTTOM), 1)

    parts = [f'<text x="{_LEFT}" y="20" font-size="14">{_escaped(title)}</text>']
    for index in range(5):
        loss = lowest + index / 4 * (highest - lowest)
        step = first + index / 4 * (last - first)
        x, y = at(step, loss)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 16}" y1="{y}" y2="{y}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{loss:.2f}</text>')
        parts.append(f'<text x="{x}" y="{_HEIGHT - 18}" text-anchor="middle">{step:.0f}</text>')
    for index, ((name, curve), colour) in enumerate(zip(name_to_curve.items(), _COLOURS, strict=False)):
        points = " ".join("{},{}".format(*at(step, loss)) for step, loss in curve)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        where = f'x="{_WIDTH - 20}" y="{_TOP + 14 + 16 * index}" text-anchor="end" fill="{colour}"'
        parts.append(f"<text {where}>{_escaped(name)}</text>")
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    content = "\n".join((f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', background, *parts, "</svg>\n"))
    with written_beside(path) as beside:
        beside.write_text(content, encoding="utf-8")


def _ranges(name_to_curve: Mapping[str, Curve]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the ranges of steps and of losses, neither empty."""
    ranges = []
    for axis in (0, 1):
        values = [point[axis] for curve in name_to_curve.values() for point in curve if abs(point[axis]) < inf]
        low, high = min(values, default=0.0), max(values, default=1.0)
        ranges.append((low, high if high > low else low + 1))
    return ranges[0], ranges[1]


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
