"""Parameters that not all ranks use in a step."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="tests of fusco.fsdp need transformers: pip install 'transformers>=5.9'")

import fsdp_unused_jobs as jobs
from torch.distributed.fsdp import FSDPModule

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.cpu_only,
    pytest.mark.skipif(
        not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
        reason="this PyTorch cannot reduce gradients of parameters that only some ranks use",
    ),
]


@pytest.mark.parametrize("has_image", [(True, False), (False, False)])
@pytest.mark.parametrize(
    ("kind", "parts"), [(jobs.Captioner, ("vision", ".more.")), (jobs.Qwen3VL, ("visual.blocks.", "deepstack"))]
)
def test_images_on_some_ranks_only(two, kind, parts, has_image):
    for differences in two.run(jobs.differences_with_images, kind, has_image):
        for part in parts:
            assert any(part in name for name in differences)
        assert max(differences.values()) < 5e-6, differences
