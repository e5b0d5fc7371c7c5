"""``fusco bench prefill`` on two ranks, and with rows that are moved wrongly."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="fusco bench prefill needs transformers: pip install 'transformers>=5.9'")

from prefill_jobs import WRONG, prefill_moved_wrongly

import fusco
from fusco.bench.harness.model_job import TINY
from fusco.bench.prefill.job import PrefillJob
from fusco.cli.main import app
from fusco.core.requirements import installed, is_recent

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]

SIZES = ["--tokens", "32", "--iterations", "2", "--routing", "trace"]


@pytest.fixture
def deep_ep(monkeypatch):
    """Let this process and its ranks find fusco's module of that name."""
    monkeypatch.syspath_prepend(str(Path(fusco.__file__).parent / "integrations" / "path"))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "deep_ep"]:
        del sys.modules[name]


@pytest.mark.usefixtures("deep_ep")
def test_all_variants_agree_and_each_has_its_record(tmp_path):
    out = tmp_path / "prefill.jsonl"
    # The second run adds the batch that the first has not.
    for options in (["--batches", "2"], ["--batches", "2,skewed", "--resume"]):
        done = CliRunner().invoke(app, ["bench", "prefill", *SIZES, *options, "--balance", "--json", str(out)])
        assert done.exit_code == 0, done.output
    lines = list(map(json.loads, out.read_text().splitlines()))
    assert "2 x 16" in done.output
    skipped = [line for line in lines if line["kind"] == "skipped"]
    records = [line for line in lines if line["kind"] == "prefill"]
    assert {line["variant"]: line["reason"] for line in skipped}["fusco-32"]
    own = ["transformers"] if is_recent(installed("transformers"), "5.23") else []
    wanted = ["fusco", "fusco-static", "torch", "baseline", *own, "deep_ep", "fusco-balanced"]
    assert [record["variant"] for record in records] == [*wanted, *wanted]
    assert [record["batch"] for record in records[:: len(wanted)]] == ["2 x 16", "skewed: 32, 4"]
    for record in records:
        assert record["verified"] is True
        assert 0 < record["ttft_ms"] <= record["p99_ms"] <= record["slowest_ms"]
        assert len(record["iterations"]) == 2
        for ranks in record["iterations"]:
            for rank in ranks:
                parts = [rank[name] for name in ("dispatch_ms", "combine_ms", "rest_ms")]
                assert min(parts) > 0
                assert sum(parts) < rank["ms"] <= record["slowest_ms"]
        assert record["dispatch_ms"] > 0
        assert record["combine_ms"] > 0
        assert 0 < record["shuffle_share"] < 1
        assert record["logits_error"] < 1e-5
        assert record["same_next_tokens"] == 1.0
        assert record["imbalance"] > 1.0
        assert ("fusco" in record["versions"].get("deep_ep", "")) == (record["variant"] == "deep_ep")


def test_a_dropped_token_and_two_swapped_rows_are_found(two):
    job = PrefillJob(
        shape=replace(TINY, hidden=64, num_heads=2, num_key_value_heads=1, head_dim=32),
        device="cpu",
        num_ranks=2,
        ranks_per_node=2,
        tokens=64,
        batches=("1",),
        variants=("fusco",),
        dtype="bfloat16",
        num_iterations=1,
    )
    for records in two.run(prefill_moved_wrongly, job):
        assert records["none"].verified, records["none"].errors
        assert records["none"].num_iterations == 1
        for name in WRONG:
            assert not records[name].verified, name
            assert records[name].num_iterations == 0  # not timed
            assert any("the output of a layer is" in error for error in records[name].errors)
