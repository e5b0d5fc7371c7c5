"""The benchmarks of failing rails: one case each, so that a long one can be run alone."""

import pytest

from fusco.bench.rails import faults
from fusco.bench.rails.suite import BENCHMARKS


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("flapping", [("rails go down and up", policy, {"seconds": 60.0}) for policy in ("direct", "fuselink")]),
        ("killing", [("owner of a rail killed", "fuselink", {"ms until its rail is used": 20.0})]),
    ],
)
def test_a_case_of_failing_rails_alone(monkeypatch, name, expected):
    monkeypatch.setattr(faults, "flap", lambda _bed, _policy, seconds: {"seconds": seconds})
    monkeypatch.setattr(faults, "kill", lambda _bed, _policy: 0.02)
    assert list(BENCHMARKS[name].measure(None, ["direct", "fuselink"], 60.0)) == expected
