"""A run continues as if it had not been interrupted, and a save is complete or invisible, whatever is killed."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_run_state_jobs as jobs
from fsdp_models import make_model

from fusco import fsdp
from fusco.bench.ranks.local_world import LocalWorld, RankFailedError

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]

NUM_KILLS = 2  # in every run of the tests at other moments


@pytest.mark.parametrize("is_async", [False, True], ids=["waiting", "asynchronous"])
def test_a_run_continues_bit_for_bit(two, tmp_path, is_async):
    """With dropout, and batches from generators of PyTorch and Python and from a loader."""
    uninterrupted, *_ = two.run(jobs.save_and_go_on, tmp_path, is_async)
    for step, rate, weights in two.run(jobs.continued, tmp_path):
        assert (step, rate) == (jobs.SAVED_AFTER, pytest.approx(1e-2 / 3))
        for name, tensor in uninterrupted.items():
            assert torch.equal(tensor, weights[name]), name


def test_what_is_not_of_the_run_is_named(two, four, tmp_path):
    two.run(jobs.save_steps, tmp_path, [3], None)
    path = tmp_path / "step-00000003"
    for rank, (nothing, scheduler, others, unsaved) in enumerate(two.run(jobs.errors_of_loading, tmp_path)):
        assert f"{tmp_path}/nothing has no saved step of a run" in nothing
        assert scheduler == f"{path} has a scheduler, and none is given"
        assert others == f"{path} has states of generator, loader, and given are none"
        assert ("rank 1 failed with ValueError: " if rank == 0 else "the state of one of others") in unsaved
    for _, others, scheduler, _ in four.run(jobs.errors_of_loading, tmp_path):
        assert f"{path} has the states of generator, loader on 2 ranks, and there are 4 now" in others
        assert scheduler == f"{path} has a scheduler, and none is given"


def test_the_last_steps_are_kept_and_a_step_can_be_saved_again(two, tmp_path):
    ((*saves,), _) = two.run(jobs.save_steps, tmp_path, [1, 5, 9, 9, 7], 2)
    one, five, nine, seven = (f"step-0000000{step}" for step in (1, 5, 9, 7))
    assert saves == [
        [one, one],
        [one, five, five],
        [five, nine, nine],
        [five, f"{nine}-2", f"{nine}-2"],
        [five, seven, f"{nine}-2", seven],
    ]


def test_a_save_that_is_killed_leaves_one_of_two_steps(two, tmp_path):
    """A random rank, at a random moment."""
    chance, took_s = random.SystemRandom(), two.run(jobs.time_of_save, tmp_path / "timed")[0]
    moments = [(chance.randrange(2), chance.random() * took_s) for _ in range(NUM_KILLS)]
    for index, moment in enumerate(moments):
        assert killed(tmp_path / str(index), *moment) in {1, 2}, moment


def killed(folder, rank, after_s):
    """Kill a rank in a save; return the step that the folder has then."""
    run = folder / "run"
    folder.mkdir()
    with LocalWorld(2) as world, pytest.raises(RankFailedError, match="exit code -9"):
        world.run(jobs.be_killed_in_save, 2, run, rank, after_s)
    again = jobs.Trainer(make_model("qwen3", num_hidden_layers=1))
    state = fsdp.RunState(model=again.model, optimizer=again.optimizer, scheduler=again.scheduler)
    with pytest.warns(UserWarning, match="is of 2 ranks, and there are 1 now"):
        step = fsdp.load_run(run, state)
    expected = torch.load(folder / f"weights-{step}.pt")
    for name, tensor in again.weights().items():
        assert torch.equal(tensor, expected[name]), name
    return step
