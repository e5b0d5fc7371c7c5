"""Folders of steps: what is there after each moment at which a save can be killed."""

from contextlib import ExitStack, suppress
from pathlib import Path
from unittest import mock

import pytest

from fusco.fsdp.run_folder import LATEST, begin_step, complete_step, find_latest


class KilledError(BaseException):
    """Stands for the end of the process."""


def save(folder, step, keep_last=None):
    hidden = begin_step(folder)
    (hidden / "content").write_text(str(step))
    return complete_step(hidden, step, keep_last)


def test_nothing_is_found_before_the_first_save(tmp_path):
    assert find_latest(tmp_path / "nowhere") is None
    begin_step(tmp_path)
    assert find_latest(tmp_path) is None


def test_the_step_saved_last_is_the_latest_even_if_it_is_an_earlier_one(tmp_path):
    for step in (5, 10, 7):
        assert find_latest(save(tmp_path, step).parent).name == f"step-{step:08d}"
    (tmp_path / LATEST).unlink()
    assert find_latest(tmp_path).name == "step-00000010"


@pytest.mark.parametrize("moment", range(8))
def test_whatever_is_killed_the_latest_is_complete(tmp_path, moment):
    """Killed before each change of the file system: 0 and 1 in writing, then renaming, ``latest`` and removing."""
    save(tmp_path, 1)
    num_changes, was = 0, {}

    def counted(name):
        def call(self, *arguments, **options):
            nonlocal num_changes
            num_changes += 1
            if num_changes > moment:
                raise KilledError
            return was[name](self, *arguments, **options)

        return call

    with ExitStack() as patches:
        patches.enter_context(mock.patch("shutil.rmtree"))  # folders that are being removed must not count
        for name in ("mkdir", "rename", "replace", "write_text"):
            was[name] = getattr(Path, name)
            patches.enter_context(mock.patch.object(Path, name, counted(name)))
        with suppress(KilledError):
            save(tmp_path, 2, keep_last=1)
    found = find_latest(tmp_path)
    assert found.name in {"step-00000001", "step-00000002"}
    assert (found / "content").read_text() == found.name[-1]
    assert [path.name for path in (save(tmp_path, 3, keep_last=1), find_latest(tmp_path))] == ["step-00000003"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, "step-00000003"]
