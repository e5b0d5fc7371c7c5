"""Signatures of the ``deep_ep`` module are DeepEP's: frameworks pass arguments by place and by name, and probe them."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from fusco.cli.main import app
from fusco.integrations.deep_ep import buffer as deep_ep_buffer, hybrid_ep_buffer as hybrid_ep
from fusco.integrations.deep_ep.ep_buffer import EPBuffer
from fusco.integrations.deep_ep.events import EventHandle, EventOverlap

_ASYNC = "previous_event=None, async_finish=False, allocate_on_comm_stream=False"
_DISPATCH = (
    "x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None, "
    "num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1"
)
# Sources: DeepEP v1.2.1 (deep_ep/buffer.py) and branch hybrid-ep at 94a9f8f (deep_ep/hybrid_ep_buffer.py), MIT licence.
SIGNATURES = {
    "HybridEPBuffer.__init__": "group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8=False, "
    "num_sms_dispatch_api=None, num_sms_combine_api=None, num_sms_preprocessing_api=None, num_blocks_permute=None, "
    "num_blocks_unpermute=None, load_cached_kernels=False, use_shared_buffer=True, enable_custom_allgather=False, "
    "num_of_hybrid_ep_ranks_per_nvlink_domain=None, use_mnnvl=None",
    "HybridEPBuffer.empty_jit_cache": "",
    "HybridEPBuffer.update_template_config": "hidden_dim=None, num_of_tokens_per_rank=None, num_local_experts=None, "
    "pad_multiple=None, use_fp8=None, fuse_permute_dispatch=False, kwargs",
    "HybridEPBuffer.dispatch": "hidden, scaling_factor=None, topk_idx=None, topk_weights=None, num_of_experts=None, "
    "probs=None, routing_map=None, num_dispatched_tokens_tensor=None, num_dispatched_tokens=None, handle=None",
    "HybridEPBuffer.combine": "hidden, probs=None, handle=None",
    "HybridEPBuffer.dispatch_with_permute": "hidden, topk_idx=None, topk_weights=None, num_of_experts_per_rank=None, "
    "num_of_experts=None, use_fp8=None, routing_map=None, probs=None, scaling_factor=None, num_permuted_tokens=None, "
    "pad_multiple=None, handle=None, non_blocking=False, fuse_permute_dispatch=False, num_dispatched_tokens=None, "
    "use_host_meta=None",
    "HybridEPBuffer.combine_with_unpermute": "hidden, probs=None, handle=None, pad_multiple=None, "
    "fuse_unpermute_combine=False, num_dispatched_tokens=None",
    # The last three are of later versions and of hybrid-ep.
    "Buffer.__init__": "group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24, "
    "allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False, comm=None, use_fabric=False, "
    "enable_shrink=False, allow_nvlink_for_normal_mode=True",
    "Buffer.destroy": "",
    "Buffer.is_sm90_compiled": "",
    "Buffer.set_num_sms": "new_num_sms",
    "Buffer.capture": "",
    "Buffer.get_comm_stream": "",
    "Buffer.get_dispatch_config": "num_ranks",
    "Buffer.get_combine_config": "num_ranks",
    "Buffer.get_dispatch_layout": f"topk_idx, num_experts, {_ASYNC}",
    "Buffer.dispatch": f"{_DISPATCH}, num_worst_tokens=0, config=None, {_ASYNC}",
    "Buffer.combine": f"x, handle, topk_weights=None, bias=None, config=None, {_ASYNC}",
    "Buffer.get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts",
    "Buffer.clean_low_latency_buffer": "num_max_dispatch_tokens_per_rank, hidden, num_experts",
    "Buffer.low_latency_dispatch": "x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, "
    "cumulative_local_expert_recv_stats=None, dispatch_wait_recv_cost_stats=None, use_fp8=True, round_scale=False, "
    "use_ue8m0=False, async_finish=False, return_recv_hook=False, "
    # Of branch hybrid-ep, which has them in other places.
    "topk_weights=None, use_nvfp4=False, use_ue8m0_for_sf=False, x_global_scale=None",
    "Buffer.low_latency_combine": "x, topk_idx, topk_weights, handle, use_logfmt=False, zero_copy=False, "
    "async_finish=False, return_recv_hook=False, out=None, combine_wait_recv_cost_stats=None, overlap=False, signals",
    "Buffer.get_next_low_latency_combine_buffer": "handle",
    # Of main at dd758ca (deep_ep/buffers/legacy.py).
    "Buffer.low_latency_update_mask_buffer": "rank_to_mask, mask=False",
    "Buffer.low_latency_query_mask_buffer": "mask_status",
    "Buffer.low_latency_clean_mask_buffer": "",
}
_V2_EVENTS = "previous_event=None, async_with_compute_stream=False, allocate_on_comm_stream=False"
# DeepEP 2.5 (deep_ep_v25/buffers/ep.py of sgl-deep-ep-v25 0.1.0rc0), then what 2.1 at dd758ca had more
# (deep_ep/buffers/elastic.py), by name. ``do_handle_copy=None`` is the default of each version.
SIGNATURES |= {
    "EPBuffer.__init__": "group, num_bytes=None, num_max_tokens_per_rank=0, hidden=0, num_topk=0, "
    "use_fp8_dispatch=False, lb_allocation_plan_or_num_bytes=0, deterministic=False, allow_hybrid_mode=True, "
    "allow_multiple_reduction=True, prefer_overlap_with_compute=True, sl_idx=None, num_allocated_qps=0, "
    "num_cpu_timeout_secs=300, num_gpu_timeout_secs=100, explicitly_destroy=False, num_cpu_bytes=0",
    "EPBuffer.destroy": "",
    "EPBuffer.get_buffer_size_hint": "group, num_max_tokens_per_rank, hidden, num_topk=0, use_fp8_dispatch=False, "
    "allow_hybrid_mode=True, allow_multiple_reduction=True",
    "EPBuffer.barrier": "wait_comm_stream=True, with_cpu_sync=False, sequential=True, context_idx=None, "
    "use_comm_stream=True",
    "EPBuffer.capture": "",
    "EPBuffer.get_comm_stream": "",
    "EPBuffer.get_physical_domain_size": "",
    "EPBuffer.get_logical_domain_size": "",
    "EPBuffer.get_theoretical_num_sms": "num_experts, num_topk, num_scaleout_topk=0, rdma_gbs=0, nvlink_gbs=0, "
    "sm_read_gbs=0, sm_write_gbs=0",
    "EPBuffer.lb_get_theoretical_num_sms": "",
    "EPBuffer.lb_prefetch_weights": "redundant_expert_weights, expert_weights, redundancy_mapping, num_sms=0, "
    "previous_event=None",
    "EPBuffer.lb_reduce_grads": "redundant_expert_grads, expert_grads, redundancy_mapping, num_sms=0, "
    "previous_event=None",
    "EPBuffer.get_theoretical_num_qps": "num_sms",
    "EPBuffer.dispatch": "x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, "
    "num_experts=None, num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, "
    f"{_V2_EVENTS}, handle=None, do_handle_copy=None, do_cpu_sync=None, do_expand=False, do_zero_padding=False, "
    "use_tma_aligned_col_major_sf=False, defer_epilogue=False, previous_event_before_epilogue=None",
    "EPBuffer.combine": f"x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, {_V2_EVENTS}, "
    "defer_epilogue=False, previous_event_before_epilogue=None",
}
CLASSES = {"HybridEPBuffer": hybrid_ep.HybridEPBuffer, "Buffer": deep_ep_buffer.Buffer, "EPBuffer": EPBuffer}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_their_names_places_and_defaults(name):
    of_class, method = name.split(".")
    parameters = inspect.signature(getattr(CLASSES[of_class], method)).parameters
    given = [n if p.default is p.empty else f"{n}={p.default}" for n, p in parameters.items() if n != "self"]
    assert ", ".join(given) == SIGNATURES[name]


def test_the_module_is_found_first_and_has_the_second_version_on_request():
    path = CliRunner().invoke(app, ["integrations", "--path", "deep_ep"]).output.strip()
    code = (
        "import os, sys\n"
        "import deep_ep, deep_ep.utils, deep_ep.buffer\n"
        "from deep_ep.hybrid_ep_buffer import HybridEPBuffer, indices_to_map\n"
        "print(deep_ep.__version__, deep_ep.Buffer.__module__, deep_ep.HybridEPBuffer is HybridEPBuffer)\n"
        "print(hasattr(deep_ep, 'ElasticBuffer'))\n"
        "try:\n"
        "    deep_ep.PPBuffer\n"
        "except AttributeError as error:\n"
        "    print(error)\n"
        "for requested in ('1', 'yes'):\n"
        "    del sys.modules['deep_ep']\n"
        "    os.environ['FUSCO_ELASTIC_BUFFER'] = requested\n"
        "    try:\n"
        "        import deep_ep\n"
        "        print(issubclass(deep_ep.ElasticBuffer, deep_ep.EPBuffer), deep_ep.EPHandle.__name__)\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([path, *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    first, *rest = done.stdout.splitlines()
    version, *others = first.split()
    assert version.startswith("1.2.1+fusco.")
    assert others == ["fusco.integrations.deep_ep.buffer", "True"]
    assert rest.pop(1) == "fusco's deep_ep has expert parallelism only, not PPBuffer"
    assert rest == ["False", "True EPHandle", "FUSCO_ELASTIC_BUFFER must be 0 or 1, got 'yes'"]


def test_the_command_lists_modules_and_refuses_others():
    assert CliRunner().invoke(app, ["integrations"]).output.split() == ["deep_ep"]
    refused = CliRunner().invoke(app, ["integrations", "--path", "nccl"])
    assert str(refused.exception) == "--path 'nccl' is not one of deep_ep"


def test_configurations_want_no_larger_buffer_for_larger_calls():
    config = deep_ep_buffer.Buffer.get_dispatch_config(3)
    assert config.get_nvl_buffer_size_hint(1 << 30, 3) == config.get_nvl_buffer_size_hint(1, 8)
    with pytest.raises(ValueError, match="must be even, got 3"):
        deep_ep_buffer.Buffer.set_num_sms(3)


def test_the_number_of_multiprocessors_is_a_number_although_none_is_set():
    """SGLang compares it with those of the device."""
    assert deep_ep_buffer.Buffer.num_sms == deep_ep_buffer.Config().num_sms == 20


def test_an_event_of_the_cpu_is_over():
    with EventOverlap(EventHandle(), (torch.empty(1),)) as event:
        event.current_stream_wait()
    EventOverlap().current_stream_wait()
