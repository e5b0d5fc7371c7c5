"""`fusco plan`: what it shows of a batch and of a shuffle, and what it refuses."""

import json
from typing import get_args

import pytest
from command_line import run

from fusco.bench.names import Pattern
from fusco.planner.balancer import BALANCERS


def _rank_bytes(record, what):
    return [rank[what] for rank in record["ranks"]]


@pytest.mark.parametrize("traffic", get_args(Pattern))
def test_plan_explains_every_pattern(traffic, tmp_path):
    out = tmp_path / "plan.jsonl"
    done = run("plan", "--traffic", traffic, "--tokens", "64", "--json", str(out))
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    assert record["traffic"] == traffic
    totals = {
        sum(rank[what] for rank in record["ranks"]) for what in ("sends", "receives", "plain_sends", "plain_receives")
    }
    assert totals == {record["internode_bytes"] // record["bytes_per_token"]}
    assert record["lane_bytes"] == record["balance"]["lanes"]["moved_rows"] * record["bytes_per_token"]
    assert record["balance"]["static"]["moved_rows"] == 0
    busiest = max(rank["sends"] for rank in record["ranks"])
    assert busiest == pytest.approx(record["balance"]["lanes"]["send_ratio"] * record["bound_rows"], abs=1)
    assert "duplicates avoided" in done.output


def test_plan_says_what_does_not_fit():
    done = run("plan", "--num-experts", "30")
    assert "30 experts do not divide evenly among 8 ranks: choose --num-experts, a multiple of 8, such as 32" in str(
        done.exception
    )
    done = run("plan", "--traffic", "single-node", "--num-experts", "8", "--num-topk", "8")
    assert "8 experts per token do not fit on one of 2 nodes" in str(done.exception)


def test_plan_shows_the_experts_copied_for_a_batch(tmp_path):
    out = tmp_path / "plan.jsonl"
    done = run("plan", "--traffic", "zipf", "--tokens", "64", "--balance", "2", "--json", str(out))
    assert done.exit_code == 0, done.output
    batch = json.loads(out.read_text())["balanced_batch"]
    assert sum(batch["rows_before"]) == sum(batch["rows_after"])
    assert batch["copies"]
    after = list(batch["rows_before"])
    for copy in batch["copies"]:
        after[copy["home"]] -= copy["num_rows"]
        after[copy["rank"]] += copy["num_rows"]
    assert after == batch["rows_after"]
    assert batch["busiest_over_mean_after"] < batch["busiest_over_mean_before"]
    assert "experts copied here" in done.output


def test_plan_shows_who_carries_segments_of_a_shuffle(tmp_path):
    out = tmp_path / "plan.jsonl"
    done = run("plan", "--shuffle", "zipf", "--nodes", "3", "--ranks-per-node", "2", "--seed", "3", "--json", str(out))
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    plain, sends = (_rank_bytes(record, what) for what in ("plain_sends", "sends"))
    assert record["has_lanes"]
    assert max(plain) > 1.125 * record["bound_bytes"] > record["bound_bytes"] >= max(sends) - 8
    for carrier in range(6):
        carries = sum(each["num_bytes"] for each in record["carried"] if each["carrier"] == carrier)
        gives = sum(each["num_bytes"] for each in record["carried"] if each["rank"] == carrier)
        assert sends[carrier] == plain[carrier] + carries - gives
    assert all(each["carrier"] // 2 == each["rank"] // 2 != each["to_node"] for each in record["carried"])
    assert sum(_rank_bytes(record, "receives")) == sum(_rank_bytes(record, "plain_receives")) == sum(sends)
    assert "carrier" in done.output


def test_plan_says_when_a_shuffle_needs_no_lanes(tmp_path):
    out = tmp_path / "plan.jsonl"
    done = run("plan", "--shuffle", "uniform", "--json", str(out))
    record = json.loads(out.read_text())
    assert [record[what] for what in ("has_lanes", "carried", "handed_on_bytes")] == [False, [], 0]
    assert set(_rank_bytes(record, "sends")) == set(_rank_bytes(record, "plain_receives")) == {record["bound_bytes"]}
    assert "without lanes: no rank has 1/8 and a slice more than its share" in " ".join(done.output.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tokens", "9999999999999999999999"],
        ["--nodes", "100000"],
        ["--seed", "9999999999999999"],
        ["--num-experts", "99999999999"],
    ],
)
def test_plan_refuses_what_no_memory_holds(arguments):
    done = run("plan", *arguments)
    assert done.exit_code == 2
    assert f"Invalid value for '{arguments[0]}'" in done.output


def test_balancers_are_compared(tmp_path):
    out = tmp_path / "balancers.jsonl"
    assert run("bench", "balancers", "--draws", "5", "--json", str(out)).exit_code == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {record["balancer"] for record in records} == set(BALANCERS)
    assert all(record["busiest_ratio"] >= 1 for record in records)
