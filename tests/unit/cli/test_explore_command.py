"""``fusco explore`` and ``--html``: pages of plans, of results, and errors as sentences."""

import json
import re

import pytest
from command_line import run

SMALL = ("--nodes", "2", "--ranks-per-node", "2", "--tokens", "64")


def views_of(path):
    """The views of a page by kind, and the rest of its JSON."""
    text = path.read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])
    return {view["kind"]: view for view in data["views"]}, data


@pytest.mark.parametrize("traffic", ["one-prompt", "trace", "imbalanced", "zipf"])
def test_a_plan_has_the_figures_of_fusco_plan(traffic, tmp_path):
    page, out = tmp_path / "plan.html", tmp_path / "plan.jsonl"
    done = run("explore", "-o", str(page), "--traffic", traffic, *SMALL)
    assert done.exit_code == 0, done.output
    assert f"wrote {page}" in done.output
    assert run("plan", "--traffic", traffic, *SMALL, "--json", str(out)).exit_code == 0
    record, (views, data) = json.loads(out.read_text()), views_of(page)
    assert list(views) == ["copies", "links", "matrix", "experts", "timeline", "replay"]
    assert data["title"] == "One dispatch on 2 nodes of 2 ranks"
    assert views["links"]["bound_rows"] == record["bound_rows"]
    for each in views["links"]["balancers"]:
        expected = record["balance"][each["name"]]
        assert each["send_ratio"] == pytest.approx(expected["send_ratio"], abs=1e-4)
        assert each["moved_rows"] == expected["moved_rows"]
    needed, sent, _ = (bar["rows"] * record["bytes_per_token"] for bar in views["copies"]["bars"])
    assert sent == record["internode_bytes"]
    assert needed - sent == record["internode_bytes_avoided"]
    assert len(views["experts"]["layers"]) == (48 if traffic in ("one-prompt", "trace") else 1)


def test_a_layer_is_chosen(tmp_path):
    page = tmp_path / "plan.html"
    assert run("explore", "-o", str(page), "--layer", "7", *SMALL).exit_code == 0
    views, data = views_of(page)
    assert views["experts"]["layers"] == [7]
    assert data["subtitle"].endswith("layer 7.")


def test_one_node_has_experts_only_and_one_rank_nothing(tmp_path):
    page = tmp_path / "plan.html"
    assert run("explore", "-o", str(page), "--nodes", "1", "--tokens", "64").exit_code == 0
    assert list(views_of(page)[0]) == ["experts"]
    done = run("explore", "-o", str(page), "--nodes", "1", "--ranks-per-node", "1", "--tokens", "64")
    assert str(done.exception) == "there is nothing to show of One dispatch on 1 node of 1 rank"


def test_results_are_shown_and_with_options_of_a_plan_the_plan_as_well(tmp_path):
    results, page = tmp_path / "results.jsonl", tmp_path / "page.html"
    row = {"kind": "prediction", "label": "a", "role": "test", "unit": "ms", "predicted": 1.1, "measured": 1.0}
    results.write_text(f"{json.dumps(row)}\n\n")
    assert run("explore", str(results), "-o", str(page)).exit_code == 0
    assert list(views_of(page)[0]) == ["predictions"]
    assert run("explore", str(results), "-o", str(page), *SMALL).exit_code == 0
    assert list(views_of(page)[0]) == ["predictions", "copies", "links", "matrix", "experts", "timeline", "replay"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{', "results.jsonl, line 2 is no JSON"),
        ("[1]", "results.jsonl, line 1 has no JSON object, but [1]"),
        ('{"a": 1, "b": 2}', "no view shows a record with the fields a, b, ..."),
        ("", "has no records"),
    ],
)
def test_what_cannot_be_shown_is_said(content, message, tmp_path):
    results = tmp_path / "results.jsonl"
    results.write_text(content)
    done = run("explore", str(results), "-o", str(tmp_path / "page.html"))
    assert message in str(done.exception)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("command", "kind"),
    [(("balancers", "--draws", "2"), "links"), (("balance", "--ranks", "8", "--layer", "3"), "experts")],
)
def test_benchmarks_write_pages_of_their_records(command, kind, tmp_path):
    page = tmp_path / "page.html"
    done = run("bench", *command, "--html", str(page))
    assert done.exit_code == 0, done.output
    assert list(views_of(page)[0]) == [kind]
