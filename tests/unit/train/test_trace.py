"""Recorded routing reads back as a trace."""

import numpy as np
import pytest

from fusco.bench.inputs.traffic import Trace, check_trace_path, write_trace


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
@pytest.mark.parametrize("num_experts", [8, 256, 300])
def test_traces_read_back(tmp_path, suffix, num_experts):
    routing = np.random.default_rng(0).integers(0, num_experts, (20, 3, 2))
    routing[0, 0, 0] = num_experts - 1
    path = tmp_path / f"trace{suffix}"
    check_trace_path(path)
    write_trace(path, routing)
    for layer in range(3):
        assert (Trace.load(path, None, layer).topk_idx == routing[:, layer]).all()


def test_paths_that_hold_no_trace_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a trace is a file \.npz or \.npy, got .*trace\.txt"):
        check_trace_path(tmp_path / "trace.txt")
