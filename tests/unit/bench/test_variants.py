"""Variants by device and nodes, their factories, and names that are rejected."""

import pytest

from fusco.bench.shuffle.factory import MAKERS
from fusco.bench.shuffle.variants import ABLATION, PEERS, VARIANTS, choose_variants, recorded_variant


def test_the_default_ones():
    assert choose_variants("cpu", 2) == ("fusco", "baseline")
    assert choose_variants("cuda", 2) == ("fusco", "fusco-static", "fusco-graph", "baseline")
    within = choose_variants("cuda", 1)
    assert within[:3] == ("fusco", "fusco-graph", "baseline")
    assert within[-1] == "fusco-fp8"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_ablation_comes_on_top_and_once(device):
    assert choose_variants(device, 4, with_ablation=True)[-4:] == ABLATION
    chosen = choose_variants(device, 2, ["no-balancer", "fusco", "fusco"], with_ablation=True)
    assert chosen == ("no-balancer", "fusco", "no-engine", "no-planner", "no-lanes")


def test_every_variant_has_an_entry():
    names = {name for device in ("cpu", "cuda") for nodes in (1, 2) for name in choose_variants(device, nodes)}
    assert names | set(ABLATION) <= set(VARIANTS)


def test_deep_ep_is_measured_where_it_is_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "deep_ep" or None)
    assert choose_variants("cuda", 1)[3:6] == PEERS == ("deep_ep", "deep_ep_v2", "deep_ep_v2-graph")
    assert not set(PEERS) & set(choose_variants("cuda", 2))


def test_names_that_are_not_offered_are_rejected():
    with pytest.raises(ValueError, match="between nodes, but there is 1 node: pass --nodes"):
        choose_variants("cuda", 1, with_ablation=True)
    with pytest.raises(ValueError, match="'fusco-fp8' is not one of those on cuda with 2 nodes: fusco, fusco-static"):
        choose_variants("cuda", 2, ["fusco-fp8"])
    with pytest.raises(
        ValueError, match="'deepep' is not one of those on cpu with 1 node: fusco, baseline, fusco-static"
    ):
        choose_variants("cpu", 1, ["deepep"])


def test_a_timeline_shows_static_rows_if_it_can():
    assert recorded_variant(("baseline", "fusco", "fusco-static")) == "fusco-static"
    assert recorded_variant(("fusco", "baseline")) == "fusco"
    assert recorded_variant(("baseline", "no-engine")) is None


def test_only_what_is_measured_by_other_means_has_no_factory():
    assert set(VARIANTS) - set(MAKERS) == {"fusco-fp8"}
    assert all(VARIANTS.values())
