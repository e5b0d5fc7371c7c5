"""Checkpoints saved again into their folder, with the process killed or an operation failing at every moment."""

import warnings

import failing_saves
import pytest
import torch
from failing_saves import fill_disk, kill
from torch import nn
from torch.distributed.checkpoint import save

from fusco import fsdp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*fork")


def make_model(value):
    """Two parameters of one value, in one file."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def values_in(path):
    """The values of a loaded checkpoint: one, or a mixture."""
    model = make_model(-1.0)
    fsdp.load_checkpoint(path, model)
    return {value for parameter in model.parameters() for value in parameter.flatten().tolist()}


def save_and_fail(path, value, moment, fail):
    model = make_model(value)
    text = "cannot be written: rank 0 failed with"
    return failing_saves.save_and_fail(lambda: fsdp.save_checkpoint(path, model), moment, fail, text)


@pytest.mark.parametrize("fail", [kill, fill_disk])
def test_one_complete_checkpoint_loads_whatever_fails(tmp_path, fail):
    fsdp.save_checkpoint(tmp_path, make_model(1.0))
    files = len(list(tmp_path.iterdir()))
    loaded, moment = [], 1
    while save_and_fail(tmp_path, 2.0, moment, fail):
        (value,) = values_in(tmp_path)
        loaded.append(value)
        fsdp.save_checkpoint(tmp_path, make_model(1.0))
        assert len(list(tmp_path.iterdir())) == files, "what the failed save left is removed"
        moment += 1
    assert set(loaded) == {1.0, 2.0}
    assert loaded == sorted(loaded), "the moment from which on it is the new one"
    assert values_in(tmp_path) == {2.0}


def test_a_first_save_that_is_killed_leaves_no_checkpoint(tmp_path):
    assert save_and_fail(tmp_path, 1.0, 3, kill)
    assert list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"has no \.metadata: no save_checkpoint into it was completed"):
        values_in(tmp_path)
    fsdp.save_checkpoint(tmp_path, make_model(1.0))
    assert values_in(tmp_path) == {1.0}


def test_a_checkpoint_of_pytorch_is_replaced(tmp_path):
    save({"model": make_model(1.0).state_dict()}, checkpoint_id=tmp_path)
    assert values_in(tmp_path) == {1.0}
    names = {each.name for each in tmp_path.iterdir()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        fsdp.save_checkpoint(tmp_path, make_model(2.0))  # PyTorch would warn that it overwrites
    assert values_in(tmp_path) == {2.0}
    assert names & {each.name for each in tmp_path.iterdir()} == {".metadata"}


def test_what_cannot_be_read_is_not_removed(tmp_path):
    """Such as on a file system that is gone for a while."""
    fsdp.save_checkpoint(tmp_path, make_model(1.0))
    (tmp_path / ".metadata").rename(tmp_path / "kept")
    (tmp_path / ".metadata").mkdir()
    with pytest.raises(OSError, match="cannot be written: rank 0 failed with IsADirectoryError"):
        fsdp.save_checkpoint(tmp_path, make_model(2.0))
    (tmp_path / ".metadata").rmdir()
    (tmp_path / "kept").rename(tmp_path / ".metadata")
    assert values_in(tmp_path) == {1.0}
