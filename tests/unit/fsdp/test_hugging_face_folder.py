"""Folders of weights saved again, with the process killed or an operation failing at every moment."""

import json

import pytest
from failing_saves import fill_disk, kill, save_and_fail

from fusco.fsdp.gathered_parts import INDEX, SINGLE, replaced_weights

pytestmark = pytest.mark.filterwarnings("ignore:.*fork")


def write(folder, value, num_shards, config):
    """As ``save_pretrained``; all weights have one value."""
    (folder / "config.json").write_text(str(config))
    if num_shards == 1:
        (folder / SINGLE).write_text(f"{value}")
        return
    shards = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    for shard in shards:
        (folder / shard).write_text(f"{value}")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(enumerate(shards))}))


def save(path, value, num_shards, config):
    with replaced_weights(path) as beside:
        write(beside, value, num_shards, config)


def read(path):
    """Return the values of weights and configuration; none if a reader finds no weights."""
    if (path / SINGLE).exists():
        shards = [SINGLE]
    elif (path / INDEX).exists():
        shards = json.loads((path / INDEX).read_text())["weight_map"].values()
    else:
        return None
    values = {(path / shard).read_text() for shard in shards}
    assert len(values) == 1, "weights of two saves"
    return values.pop(), (path / "config.json").read_text()


@pytest.mark.parametrize(
    ("nums_shards", "configs", "fail"),
    [
        ((3, 3), "ss", kill),
        ((3, 3), "st", fill_disk),
        ((1, 1), "st", kill),
        ((1, 2), "ss", fill_disk),
        ((1, 2), "st", kill),
        ((2, 1), "ss", kill),
        ((2, 1), "st", fill_disk),
    ],
)
def test_weights_of_one_save_are_found_whatever_fails(tmp_path, nums_shards, configs, fail):
    old, new = (("old", nums_shards[0], configs[0]), ("new", nums_shards[1], configs[1]))
    found, moment = [], 1
    while True:
        path = tmp_path / str(moment)
        path.mkdir()
        write(path, *old)
        (path / "tokenizer.json").write_text("stays")
        if not save_and_fail(lambda path=path: save(path, *new), moment, fail):
            break
        found.append(read(path))
        save(path, *new)
        assert read(path) == ("new", configs[1])
        assert len(list(path.iterdir())) == nums_shards[1] + (nums_shards[1] > 1) + 2, "what was left is removed"
        assert (path / "tokenizer.json").read_text() == "stays"
        moment += 1
    assert set(found) - {None} == {("old", configs[0]), ("new", configs[1])}
    if configs[0] == configs[1]:
        assert None not in found
    first = found.index(("new", configs[1]))
    assert set(found[:first]) <= {("old", configs[0]), None}
    assert set(found[first:]) == {("new", configs[1])}


def test_an_index_never_refers_to_the_shards_of_a_later_save(tmp_path):
    save(tmp_path, "0", 2, "c")
    indices = [(tmp_path / INDEX).read_text()]
    assert "model-00001-of-00002.safetensors" in indices[0]
    for value in "123":
        save(tmp_path, value, 2, "c")
        for index in indices:
            assert not any((tmp_path / name).exists() for name in json.loads(index)["weight_map"].values())
        indices.append((tmp_path / INDEX).read_text())
    assert read(tmp_path) == ("3", "c")
    assert len(list(tmp_path.iterdir())) == 4


def test_a_first_save_that_fails_leaves_no_weights(tmp_path):
    assert save_and_fail(lambda: save(tmp_path / "new", "1", 2, "c"), 4, kill)
    assert read(tmp_path / "new") is None
    save(tmp_path / "new", "1", 2, "c")
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]


def test_adapters_in_subfolders_and_a_card_that_is_amended(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    with replaced_weights(tmp_path) as beside:
        (beside / "README.md").write_text((beside / "README.md").read_text() + " and theirs")
        (beside / "other").mkdir()
        for name in ("adapter_model.safetensors", "other/adapter_model.safetensors", "other/adapter_config.json"):
            (beside / name).write_text("1")
    assert (tmp_path / "README.md").read_text() == "mine and theirs"
    assert sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.*")) == [
        "README.md",
        "adapter_model.safetensors",
        "other/adapter_config.json",
        "other/adapter_model.safetensors",
    ]
