"""Every MoE architecture of the installed transformers: found in its sources, made tiny by rules on sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from fusco import fsdp

_MODELS = Path(transformers.__file__).parent / "models"
_STACKED_EXPERTS = re.compile(r"self\.(gate_up_proj|up_proj) = nn\.Parameter")
_NUM_LAYERS = 4  # some have experts in every fourth only

# Models around the text model of another architecture, which is what they have by default.
_AROUND_OTHERS = ("kimi_k25", "nemotron3_5_transcribe", "nemotron_h_omni")
# Models that cannot be made here.
UNMADE = {
    "InklingVisionModel": "scipy",
    "InklingModel": "scipy",
    "InklingForConditionalGeneration": "scipy",
    "Qwen3OmniMoeCode2WavDecoderBlock": "missing 1 required positional argument: 'layer_idx'",  # a layer, not a model
}
# Models with experts that ``parallelize`` rejects, by the beginning of their names, and the error.
REJECTED = {
    "DiffusionGemmaModel": "are one parameter, but FSDP shards their modules separately",  # encoder and decoder are
    "DiffusionGemmaForBlockDiffusion": "are one parameter, but FSDP shards their modules separately",
    "MuseSpark": r"post_expert_norm.weight of shape \(16,\) cannot be distributed",
}

# Architectures that cannot be trained, and why.
EXCEPTIONS = {"muse_spark": "experts share a norm"}

# The first rule whose pattern matches the whole name of a field gives the maximum of an integer.
_NAME_TO_SIZE = (
    (r"(num_|n_)?(hidden_|encoder_|decoder_|block_|mlp_|speech_)?layers?|depth|\w+_layers", _NUM_LAYERS),
    (r"(num_|n_)?\w*experts_per_tok(en)?|num_selected_experts|moe_k|top_k_experts|\w*moe_top_?k", 2),
    (r"\w*shared_experts", 1),
    (r"(num|n|moe)_\w*experts", 4),
    (r"n_groups?|topk_group|num_expert_groups?|\w+_n_groups?", 1),
    (r"first_k_dense_replace|num_nextn_predict_layers", 1),
    (r"\w*heads?", 2),
    (r"\w*head_dim|\w*lora_rank|qk_\w*dim|v_head_dim", 8),
    (r"\w*vocab_size\w*", 40),
    (r"\w*token_id|\w*token_index", 3),
    (r"\w*(intermediate|ffn|inter|hidden|embed|adapter|mlp)\w*_(size|dim)|d_model|\w*_ffn|\w*_out_dim|\w*_in_dim", 16),
    (r"(max_position_embeddings|num_position_embeddings|max_source_positions|image_size)", 64),
)
_SPARSE = ["dense"] + ["sparse"] * (_NUM_LAYERS - 1)
_SECTIONED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
# Sizes that no rule covers, by class of configuration.
_CONFIG_TO_SIZES: dict[str, dict[str, Any]] = {
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "DeepseekV4Config": {"mlp_layer_types": ["hash_moe"] + ["moe"] * (_NUM_LAYERS - 1)},
    "DeepseekOcr2TextConfig": {"num_experts_per_tok": 2, "mlp_layer_types": _SPARSE},
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
    "Dots3NoteTextConfig": {"use_sliding_window": False},
    "Dots3NoteVisionConfig": {"pyramid_num_routed": [-1, -1, 4, 4]},
    "RadioConfig": {"video_temporal_patch_size": 2},
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Ernie4_5_VLMoeTextConfig": {"moe_intermediate_size": [8, 8], "rope_parameters": _SECTIONED},
    "Ernie4_5_VL_MoeTextConfig": {"moe_intermediate_size": [8, 8], "rope_parameters": _SECTIONED},
    "Gemma4TextConfig": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
    "Glm4vMoeTextConfig": {"rope_parameters": {**_SECTIONED, "partial_rotary_factor": 1.0}},
    "HunYuanMoEV1Config": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "LongcatFlashConfig": {"n_routed_experts": 4, "zero_expert_num": 2},
    "MiMoV2FlashConfig": {"num_key_value_heads": 1},  # layers with a window have twice as many
    "HYV4VLTextConfig": {"rope_parameters": _SECTIONED},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * (_NUM_LAYERS // 2)},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 8},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "Step3p7TextConfig": {"sliding_window": 4},
    "Qwen3VLMoeVisionConfig": {"deepstack_visual_indexes": [1]},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "eos_token_id": 2,
        "ngram_vocab_size_base": 40,
        "split_ngram_parts": 2,
    },
}


def find_kinds(names: Sequence[str] = ("",)) -> list[str]:
    """Architectures, by their folders in transformers, whose code has one of the names; nothing is imported."""
    sources = ((file.parent.name, file.read_text(encoding="utf-8")) for file in _MODELS.glob("*/modeling_*.py"))
    kinds = {kind for kind, text in sources if _STACKED_EXPERTS.search(text) and any(name in text for name in names)}
    return sorted(kinds | {kind for kind in _AROUND_OTHERS if (_MODELS / kind).exists()})


def find_roots(kind: str) -> list[type[transformers.PreTrainedModel]]:
    """An architecture's public classes of models, with experts or without."""
    roots = []
    for file in sorted((_MODELS / kind).glob("modeling_*.py")):
        module = importlib.import_module(f"transformers.models.{kind}.{file.stem}")
        public = [getattr(module, name) for name in module.__all__]
        roots += [each for each in public if inspect.isclass(each) and issubclass(each, transformers.PreTrainedModel)]
    return [root for root in roots if "PreTrained" not in root.__name__ and inspect.isclass(root.config_class)]


def make_root(root: type[transformers.PreTrainedModel], device: str = "cpu") -> transformers.PreTrainedModel:
    """A tiny model; the same weights at every call, no two alike."""
    model = _make(root, device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        for module in model.modules():
            if getattr(module, "zero_expert_num", 0):
                module.gate_up_proj[len(module.down_proj) :] = 0  # rows that nothing uses
    return model


def make_trained(root: type[transformers.PreTrainedModel], dtype: torch.dtype) -> transformers.PreTrainedModel:
    """A tiny model whose gradients are neither lost nor all rounding; as ``make_root``."""
    model = _make(root, "cpu", attn_implementation="eager").to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.25 * noise if parameter.ndim > 1 else parameter + 0.05 * noise)
    return model.eval()  # PhiMoE draws experts while it trains


def trained_root(kind: str) -> type[transformers.PreTrainedModel]:
    """Of an architecture's classes with experts that run and are not rejected, the one for causal language models."""
    roots = []
    for root in find_roots(kind):
        is_rejected = root.__name__.startswith(tuple(REJECTED)) or root.__name__ in UNMADE
        if not is_rejected and root.forward is not torch.nn.Module.forward:
            with contextlib.suppress(ValueError):
                fsdp.find_experts(make_root(root, "meta"))
                roots.append(root)
    if not roots:
        raise ValueError(f"{kind} has no class with experts that fusco.fsdp accepts")
    uses = ("ForCausalLM", "ForConditionalGeneration", "TextModel", "")
    return min(roots, key=lambda root: next(place for place, use in enumerate(uses) if use in root.__name__))


def _make(root: type[transformers.PreTrainedModel], device: str, **options: str) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    with torch.device(device):
        model: transformers.PreTrainedModel = root._from_config(_config(root), **options)  # as AutoModel does
    return model


def _config(root: type[transformers.PreTrainedModel]) -> transformers.PreTrainedConfig:
    return root.config_class(**_sizes(root.config_class))


def _sizes(config_class: type[transformers.PreTrainedConfig]) -> dict[str, Any]:
    fixed = _CONFIG_TO_SIZES.get(config_class.__name__, {})
    parts = {} if not config_class.sub_configs else _parts(config_class)
    sizes: dict[str, Any] = {}
    for each in dataclasses.fields(config_class):
        if each.name in parts or not isinstance(each.default, int) or isinstance(each.default, bool):
            continue
        maximum = next((size for pattern, size in _NAME_TO_SIZE if re.fullmatch(pattern, each.name)), each.default)
        sizes[each.name] = min(maximum, each.default)
    return {**sizes, **parts, **fixed}


@cache
def _parts(config_class: type[transformers.PreTrainedConfig]) -> dict[str, Any]:
    """Configurations of the models within."""
    parts = {}
    whole = config_class()
    for name in config_class.sub_configs:
        part = getattr(whole, name, None)
        if part is not None:
            parts[name] = {"model_type": part.model_type, **_sizes(type(part))}
    return parts
