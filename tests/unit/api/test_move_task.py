"""Tasks of moves: paces, and what a share of the time means."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import fusco
from fusco.api import move_task
from fusco.api.move_task import MoveTask
from fusco.api.placement_move import ExpertMemory, describe_experts


class Transfers:
    """Three steps without bytes."""

    num_steps = 3

    def request(self, step):
        return f"step {step}"

    def end(self, step, request):
        assert request == f"step {step}"


def task_of(outcomes, pace=None):
    """Return a task whose exchanges return ``outcomes`` in turn unless this rank holds back, and what it asked for."""
    asked, left = [], iter(outcomes)

    def exchange(request, is_held):
        asked.append((request, is_held))
        return not is_held and next(left)

    def end(is_held):
        asked.append(("end", is_held))
        return not is_held

    return MoveTask(Transfers(), pace or fusco.Pace(), exchange, end), asked


def test_a_step_that_another_rank_holds_back_is_repeated():
    task, asked = task_of([True, False, True, True])
    progress = []
    while not task.step():
        progress.append(task.progress)
    assert progress == [0.25, 0.25, 0.5, 0.75]
    assert (task.progress, task.is_done) == (1.0, True)
    assert asked == [(f"step {step}", False) for step in (0, 1, 1, 2)] + [("end", False)]


def test_a_pause_lasts_until_resume_or_wait():
    task, asked = task_of([True] * 3)
    task.pause()
    assert not task.step()
    assert asked == [("step 0", True)]
    task.resume()
    assert not task.step()
    task.pause()
    task.wait()
    assert task.is_done
    assert [is_held for _, is_held in asked] == [True] + [False] * 4


def test_a_small_share_holds_back_after_the_first_step():
    task, asked = task_of([True] * 3, fusco.Pace(share=1e-9))
    assert not any(task.step() for _ in range(3))
    assert [is_held for _, is_held in asked] == [False, True, True]


def test_a_rate_holds_back_until_the_bytes_of_complete_steps_are_due():
    with mock.patch.object(move_task, "perf_counter") as clock:
        task, asked = task_of([True] * 3, fusco.Pace(step_bytes=100, bytes_per_s=50.0))
        for clock.return_value in (1.0, 2.0, 2.9, 3.0, 4.0, 5.0):
            task.step()
    assert [is_held for _, is_held in asked] == [False, True, True, False, True, False]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"share": 0.0}, "share must be above 0 and at most 1, got 0.0"),
        ({"share": 1.5}, "share must be above 0 and at most 1, got 1.5"),
        ({"step_bytes": 0}, "step_bytes must be positive, got 0"),
        ({"bytes_per_s": 0}, "bytes_per_s must be positive, got 0"),
        ({"num_sms": 0}, "num_sms must be positive, got 0"),
    ],
)
def test_mistakes_in_a_pace_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        fusco.Pace(**arguments)


def test_many_tensors_are_described_in_few_words():
    text = describe_experts([torch.empty(1, 7, 5)] * 200)
    assert text.startswith("200 tensors (")
    assert len(text) < 40


def test_an_expert_is_written_in_pieces_of_any_size():
    rows = torch.zeros(6, 5, dtype=torch.int16)
    memory = ExpertMemory([rows[::2], torch.zeros(3, 3, dtype=torch.uint8)])
    assert memory.bytes_per_expert == 13
    data = torch.arange(1, 14, dtype=torch.uint8)
    memory.write(1, [data[:4], data[4:11], data[11:]])
    assert torch.cat(list(memory.pieces(1, 0, 13))).tolist() == data.tolist()
    assert torch.cat(list(memory.pieces(1, 3, 12))).tolist() == data[3:12].tolist()
    assert not rows[[0, 1, 3, 4, 5]].any()
    assert rows[2].view(torch.uint8).tolist() == data[:10].tolist()
