"""Curves of losses, as text and as a picture."""

import xml.etree.ElementTree as ET

import pytest

from fusco.cli.curve import draw_curves, write_picture

CURVES = {"loss": [(step, 6 - step / 40) for step in range(1, 201)], "held-out <loss>": [(100, 4.0), (200, 1.5)]}


@pytest.mark.parametrize("width", [40, 80, 200])
def test_curves_are_no_wider_than_the_terminal(width):
    lines = draw_curves(CURVES, width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("  5.97 ┤•")
    assert lines[9].startswith("  1.00 ┤")
    assert sum(line.count("o") for line in lines[:10]) == 2


@pytest.mark.parametrize("curve", [[(1, 2.0)], [(1, 2.0), (2, 2.0)], [(1, float("nan")), (2, 1.0)]])
def test_few_and_equal_losses_are_drawn(curve, tmp_path):
    finite = [(step, loss) for step, loss in curve if loss == loss]
    assert "•" in draw_curves({"loss": finite}, 80)
    write_picture(tmp_path / "loss.svg", {"loss": finite}, "title")


def test_a_picture_has_a_line_for_each_curve(tmp_path):
    write_picture(tmp_path / "loss.svg", CURVES, "losses")
    lines = ET.parse(tmp_path / "loss.svg").findall(".//{http://www.w3.org/2000/svg}polyline")
    assert [len(line.get("points").split()) for line in lines] == [200, 2]
