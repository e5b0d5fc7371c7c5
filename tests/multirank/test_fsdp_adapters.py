"""Adapters of peft on a parallelized model: trained, written, above weights that are read, and merged."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")
pytest.importorskip("peft", reason="tests of adapters need peft: pip install peft")

import fsdp_adapter_jobs as jobs
import peft
import transformers
from fsdp_models import make_batch, make_model
from fsdp_runs import Run

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]

# As people type them, on dense layers and on experts. A rank of 3 is no multiple of 16 bytes.
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ON_EXPERTS = [
    {"target_modules": "all-linear"},
    {"kind": "olmoe", "target_modules": "all-linear"},
    {"kind": "mixtral", "target_modules": ["q_proj", "w1", "w2", "w3"], "use_rslora": True},
    {"kind": "gpt-oss", "target_modules": [], "target_parameters": _EXPERTS, "r": 3},
    {"kind": "deepseek-v3", "target_modules": [], "target_parameters": _EXPERTS[:1], "r": 4},
]
KINDS = [{}, {"use_dora": True}, {"modules_to_save": ["embed_tokens", "lm_head"]}, *ON_EXPERTS]
RUNS = [
    Run(dispatcher="torch", ep_size=1),
    Run(expert_dim=0, recomputes="full"),
    Run(recomputes="selective"),
    Run(ep_size=4, spare_places=1),
]


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=make_batch(0, 1).ids).logits


@pytest.mark.parametrize("changes", [KINDS[1], KINDS[2], *ON_EXPERTS[1:]])
def test_gradients_are_those_of_one_process(two, changes):
    for differences in two.run(jobs.differences_of_gradients, **changes):
        assert len(differences) >= 2
        assert max(differences.values()) < 5e-6


@pytest.mark.parametrize("run", RUNS)
def test_gradients_on_experts_are_those_of_one_process_in_any_layout(four, run):
    for differences in four.run(jobs.differences_of_gradients, run, target_modules="all-linear"):
        assert sum(".mlp.experts." in name for name in differences) == 8
        assert max(differences.values()) < 5e-6


def test_adapters_on_experts_can_be_disabled_and_unloaded(two):
    adapted = jobs.make_adapted(target_modules="all-linear")
    for logits in two.run(jobs.logits_without_adapters):
        assert torch.equal(logits["disabled"], logits["unloaded"])
        torch.testing.assert_close(logits["disabled"], logits_of(make_model("qwen3")), rtol=0, atol=1e-5)
        torch.testing.assert_close(logits["with"], logits_of(adapted), rtol=0, atol=1e-5)
        assert (logits["with"] - logits["disabled"]).abs().max() > 0.1


@pytest.mark.parametrize("changes", [{}, KINDS[2], ON_EXPERTS[2], ON_EXPERTS[3]])
def test_adapters_that_are_written_reload(two, tmp_path, changes):
    for _ in range(1 if changes else 2):  # into the same folder again
        gathered, _ = two.run(jobs.export, tmp_path, **changes)
        assert not any(".layers." in name and "lora_" not in name for name in gathered)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in tmp_path.iterdir()}
    again = peft.PeftModel.from_pretrained(make_model(changes.get("kind", "qwen3")), tmp_path)
    assert torch.equal(logits_of(again), logits_of(jobs.make_adapted(**changes)))


@pytest.mark.parametrize(
    ("changes", "is_on_meta"),
    [
        (KINDS[2], True),
        ({"target_parameters": ["mlp.gate.weight"]}, False),
        (ON_EXPERTS[0], False),
        (ON_EXPERTS[1], True),
    ],
)
def test_weights_below_adapters_are_read(two, tmp_path, changes, is_on_meta):
    make_model(changes.get("kind", "qwen3")).save_pretrained(tmp_path)
    expected = jobs.make_adapted(**changes).state_dict()
    for weights in two.run(jobs.read, tmp_path, is_on_meta, **changes):
        assert weights.keys() == expected.keys()
        for name, tensor in weights.items():
            if not is_on_meta or "lora_" not in name:
                assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("start", [True, "gaussian"])
def test_adapters_made_on_meta_start_as_those_of_peft(two, tmp_path, start):
    make_model("qwen3").save_pretrained(tmp_path)
    options = {"target_modules": "all-linear", "init_lora_weights": start, "r": 4}
    adapters, again = two.run(jobs.adapters_on_meta, tmp_path, **options)
    torch.testing.assert_close(adapters.pop("logits"), logits_of(make_model("qwen3")), rtol=0, atol=1e-5)
    expected = jobs.make_adapted(**options).state_dict()
    assert len(adapters) == 28
    for name, values in adapters.items():
        assert torch.equal(values, again[name])
        assert values.any() == (".lora_A." in name)
        if values.numel() >= 256:
            assert float(values.std()) == pytest.approx(float(expected[name].std()), rel=0.2)


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"init_lora_weights": "pissa"}])
def test_adapters_that_depend_on_the_weights_are_not_put_above_others(two, tmp_path, changes):
    make_model("qwen3").save_pretrained(tmp_path)
    for text in two.run(jobs.error_of_reading, tmp_path, **changes):
        assert text.startswith("adapter default (peft_type=")
        assert text.endswith("may depend on the weights below it: read them before peft wraps the model")


@pytest.mark.parametrize(
    ("changes", "safe_merge"),
    [(KINDS[1], False), (KINDS[2], True), *((changes, i % 2 == 0) for i, changes in enumerate(ON_EXPERTS[1:]))],
)
def test_adapters_merge_into_shards(two, tmp_path, safe_merge, changes):
    expected = jobs.make_adapted(**changes).merge_and_unload(safe_merge=safe_merge)
    for merged in two.run(jobs.merge, tmp_path, safe_merge, **changes):
        assert merged.weights.keys() == expected.state_dict().keys()
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(merged.weights[name], tensor, rtol=0, atol=1e-6)
        torch.testing.assert_close(merged.logits, logits_of(expected), rtol=0, atol=1e-5)
        assert "ForCausalLM are gathered by the PeftModel that was parallelized: " in merged.error
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(again), logits_of(expected), rtol=0, atol=1e-5)


def test_adapters_on_experts_merge_into_any_shards(four, tmp_path):
    expected = jobs.make_adapted(**ON_EXPERTS[0]).merge_and_unload().state_dict()
    for merged in four.run(jobs.merge, tmp_path, False, 0, **ON_EXPERTS[0]):
        for name, tensor in expected.items():
            torch.testing.assert_close(merged.weights[name], tensor, rtol=0, atol=1e-6)


def test_broken_adapters_do_not_merge(two):
    for text in two.run(jobs.error_of_merging_broken_adapters):
        assert text == "adapter default makes values of down_proj infinite or not a number"


def test_adapters_do_not_merge_into_whole_copies(two):
    for text in two.run(jobs.error_of_merging_whole_copies):
        assert text.startswith("weights of base_model.model.lm_head are whole copies")


def test_data_parallel_says_what_to_call(two):
    for text in two.run(jobs.error_of_data_parallel):
        assert text.startswith("DistributedDataParallel cannot wrap this Qwen3MoeForCausalLM")
        assert "fusco.fsdp.registered_with_transformers" in text
