"""Writers of metrics by target; TensorBoard and Weights & Biases are stand-ins, which note what they are given."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from fusco.fsdp.metrics import CsvWriter, JsonLinesWriter, open_writer

STEP = SimpleNamespace(step=3, flat=lambda: {"loss": 2.5, "layers/0/cv": 0.25})


@pytest.mark.parametrize(("name", "kind"), [("m.csv", CsvWriter), ("m.jsonl", JsonLinesWriter)])
def test_a_file_is_written_by_its_suffix(name, kind, tmp_path):
    writer = open_writer(str(tmp_path / name))
    assert type(writer) is kind
    writer.close()


def test_a_folder_is_tensorboards(tmp_path, monkeypatch):
    module = mock.Mock()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    writer = open_writer(str(tmp_path))
    writer.write(STEP)
    writer.close()
    module.SummaryWriter.assert_called_once_with(str(tmp_path))
    made = module.SummaryWriter.return_value
    assert made.mock_calls == [
        mock.call.add_scalar("loss", 2.5, 3),
        mock.call.add_scalar("layers/0/cv", 0.25, 3),
        mock.call.close(),
    ]


def test_a_run_of_wandb_gets_all_numbers(monkeypatch):
    module = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", module)
    writer = open_writer("wandb")
    writer.write(STEP)
    writer.close()
    assert module.init.return_value.mock_calls == [mock.call.log(STEP.flat(), step=3), mock.call.finish()]
