"""Views of records and simulations."""

import numpy as np
import pytest
from explored import simulation, variant

from fusco.cli.explore.records import facts_of, record_views, subtitle_of, title_of
from fusco.placement import Balance


def views_of(*records):
    return {view.kind: view for view in record_views(records, Balance(2))}


def test_variants_of_a_shuffle():
    runs = views_of(variant("fusco", 2.0, 3.0, bound_ms=1.5), variant("baseline", 4.0, 6.0, verified=False))["runs"]
    assert runs.title == "fusco takes 5 ms, baseline 2.0 times as long"
    assert runs.machine == "measured on AMD EPYC, 2 nodes x 2 ranks"
    fusco, baseline = runs.runs
    assert (fusco.workload, fusco.bound_ms) == ("trace", 3.0)
    assert (fusco.internode_bytes, fusco.lower_bound_bytes) == (3000, 2000)
    assert (baseline.is_right, baseline.bound_ms, baseline.note) == (False, None, "wrong")


def test_batches_are_told_apart_and_variants_without_a_time_left_out():
    records = [variant("fusco", 2.0, 3.0, batch=i) for i in range(2)] + [variant("deep-ep", None, None)]
    assert [run.workload for run in views_of(*records)["runs"].runs] == ["trace, batch 0", "trace, batch 1"]
    with pytest.raises(ValueError, match="none of the 1 variants was timed"):
        views_of(variant("fusco", None, None))


def test_a_slower_fusco_is_told_as_well():
    assert views_of(variant("fusco", 5.0, 5.0), variant("baseline", 1.0, 1.0))["runs"].title == (
        "fusco takes 10 ms, the longest of all"
    )


def test_balance_and_balancers():
    layers = [
        {"layer": i, "ranks": 8, "spare_places": 2, "experts_copied_per_rank": 0.5}
        | {"busiest_over_mean_before": 1.5 + i, "busiest_over_mean_after": 1.01}
        for i in range(3)
    ]
    view = views_of(*layers)["experts"]
    assert (view.before, view.ratio_before, view.copies) == ([], [1.5, 2.5, 3.5], [4, 4, 4])
    assert view.title.startswith("In layer 2 the busiest rank computes 3.5 times the mean; 2 spare places")
    names = {"static": 2.1, "lanes": 1.01}
    balancers = [
        {"balancer": name, "busiest_ratio": ratio, "send_ratio": ratio, "receive_ratio": 1.0}
        | {"nodes": 4, "ranks_per_node": 8}
        for name, ratio in names.items()
    ]
    assert views_of(*balancers)["links"].title == "Lanes bring the busiest NIC from 2.1 to 1.01 of the bound"


def test_every_view_of_a_simulation():
    slower = [simulation("nccl", call, 5.0) for call in ("dispatch", "combine")]
    views = views_of(*slower, simulation(), simulation(call="combine"))
    assert set(views) == {"runs", "copies", "links", "matrix", "experts", "timeline", "replay", "constants"}
    assert views["runs"].title == "fusco takes 4 ms, nccl 2.5 times as long"
    assert [bar.rows for bar in views["copies"].bars] == [120, 80, 80]
    assert views["matrix"].before == [[0, 60], [60, 0]]
    assert views["matrix"].after == [[0, 40], [40, 0]]
    assert views["links"].title == "Lanes bring the busiest NIC from 1.5 to 1.00 of the bound"
    assert views["links"].balancers[0].sends == [30, 10, 20, 20]
    assert views["experts"].ratio_before == [1.5]
    assert views["timeline"].kinds == ["pack", "between nodes"]
    assert len(views["timeline"].of_lane) == 8
    replay = views["replay"]
    assert (replay.end_gbs, replay.step_us, replay.total_us) == (45.0, 500.0, 2000.0)
    assert replay.sends_gbs[1] == [10.0, 12.0, 14.0, 16.0]
    assert replay.receives_gbs[1] == [11.0, 13.0, 15.0, 17.0]
    assert views["constants"].title == "1 of 2 constants of two were fitted to published results"
    assert "dispatch: nic-out of rank 0 is busy for 75 % of it" in {
        run.note.split(";")[0] for run in views["runs"].runs
    }
    given = [{**each, "trained": [], "source": "default, not measured"} for each in simulation()["constants"]]
    title = views_of(simulation(constants=given))["constants"].title
    assert title == "None of the 2 constants of two was fitted to a result, 2 are defaults"


def test_a_simulation_without_times_or_experts_has_the_other_views():
    lacking = {"tier": "bound", "spans": [], "samples": None, "expert_rows": [], "expert_rows_by_rank": []}
    assert set(views_of(simulation(**lacking))) == {"runs", "copies", "links", "matrix", "constants"}


def test_lanes_of_many_ranks_are_the_slowest_rank_of_each_node():
    spans = [{"rank": rank, "name": "pack", "start_ms": 0.0, "end_ms": 1.0 + rank % 7} for rank in range(512)]
    view = views_of(simulation(ranks=512, nodes=64, ranks_per_node=8, spans=spans, expert_rows_by_rank=[]))["timeline"]
    assert view.lanes == [f"node {node}" for node in range(64)]
    assert view.end_us == [1e3 * (1 + max(rank % 7 for rank in range(8 * i, 8 * i + 8))) for i in range(64)]


def test_experts_of_another_placement_are_shown_without_copies():
    view = views_of(simulation(expert_rows_by_rank=[10, 30, 20, 20]))["experts"]
    assert (view.before, view.spare_places) == ([[10, 30, 20, 20]], 0)


def test_rates_of_nodes_have_the_nodes_share():
    samples = {"step_ms": 1.0, "links": ["nic-out of node 0", "nic-in of node 1"], "gbs": [[90.0, 45.0]]}
    view = views_of(simulation(samples=samples))["replay"]
    assert (view.end, view.num_ends, view.end_gbs) == ("node", 2, 90.0)
    assert (view.sends_gbs, view.receives_gbs) == ([[90.0, 0.0]], [[0.0, 45.0]])


def test_predicted_beside_measured():
    measured = [variant("fusco", 2.0, 4.0)]
    predicted = [simulation(makespan_ms=1.9), simulation(call="combine", makespan_ms=4.4), simulation("nccl")]
    view = views_of(*measured, *predicted)["predictions"]
    assert [(row.label, row.predicted, row.measured) for row in view.rows] == [
        ("fusco, dispatch, trace", 1.9, 2.0),
        ("fusco, combine, trace", 4.4, 4.0),
    ]
    assert view.title == "Held-out results are predicted within 10 %"


def test_fitted_rows_are_last_and_no_test():
    rows = [
        {"kind": "prediction", "label": role, "role": role, "unit": "ms", "predicted": 1.5, "measured": 1.0}
        for role in ("train", "test")
    ]
    assert [row.role for row in views_of(*rows)["predictions"].rows] == ["test", "train"]
    assert views_of(rows[0])["predictions"].title == "1 predictions, all of results that constants were fitted to"


def sweep(times, axis="nodes"):
    """Results of systems at 2, 4 and 8 nodes, tokens a rank, or of skew; ``None`` is no result."""
    return [
        simulation(system, makespan_ms=ms, **{axis: 4 * place if axis == "tokens" else place})
        for system, of_system in times.items()
        for place, ms in zip((2, 4, 8), of_system, strict=True)
        if ms is not None
    ]


def test_a_sweep_has_a_view_and_the_rest_is_of_one_size():
    for axis, named in (("nodes", "nodes"), ("tokens", "tokens a rank"), ("skew", "skew")):
        views = views_of(*sweep({"fusco": (1.0, 2.0, 4.0), "nccl": (3.0, 2.0, None)}, axis))
        view = views["sweep"]
        assert (view.axis, view.places) == (named, [2, 4, 8])
        assert {each.name: each.ms for each in view.series} == {"fusco": [1.0, 2.0, 4.0], "nccl": [3.0, 2.0, None]}
        where = "skew 2.0" if axis == "skew" else f"2 {named}"
        assert view.title == f"None is faster than fusco; the next takes 3.0 times as long at {where}"
        assert [run.variant for run in views["runs"].runs] == ["fusco", "nccl"]


def test_a_sweep_says_where_fusco_is_slower():
    titles = [
        views_of(*sweep({"fusco": (2.0, 2.0, 2.0), "nccl": of}))["sweep"].title
        for of in ((1.0, 3.0, 5.0), (1.0, 1.0, 1.0), (None, None, None))
    ]
    assert titles == [
        "fusco is not the fastest at 2 nodes; the next takes 2.5 times as long at 8",
        "fusco is not the fastest at 2, 4, 8 nodes",
        "fusco from 2 to 8 nodes",
    ]
    assert facts_of(sweep({"fusco": (1.0, 2.0, 4.0)}))["nodes"] == "2 to 8"


def test_an_unknown_record_is_named():
    with pytest.raises(ValueError, match=r"no view shows a record with the fields height, width, \.\.\."):
        record_views([{"height": 1, "width": 2}], Balance(2))


def test_titles_and_facts_of_records():
    assert title_of([simulation()]) == "What two would do"
    assert title_of([variant("fusco", 1, 1)]) == "Measured on ranks"
    assert title_of([variant("fusco", 1, 1), simulation()]) == "Predicted and measured"
    by_law = simulation(traffic="skewed: nodes Gamma(8)")
    assert facts_of([by_law])["traffic"] == "skewed"
    assert subtitle_of([by_law]) == "Predicted by a model, not measured. Traffic by law: nodes Gamma(8)."
    assert subtitle_of([variant("fusco", 1, 1)]) == ""
    facts = {"traffic": "trace", "nodes": "2", "ranks a node": "2"}
    assert facts_of([simulation()]) == {"cluster": "two", **facts, "tokens of all ranks": "40"}
    assert facts_of([variant("fusco", 1, 1)]) == {**facts, "tokens of all ranks": "4,096"}
    assert facts_of([{"label": "x"}]) == {}


def test_rates_are_rounded_but_true():
    samples = simulation()["samples"]
    rates = np.array(views_of(simulation())["replay"].sends_gbs)
    assert rates == pytest.approx(np.array(samples["gbs"])[:, ::2], abs=1e-3)
