"""Functions on ranks: a model with a part that not all ranks use in a step."""

from __future__ import annotations

import torch
import torch.distributed as dist
import transformers
from fsdp_architectures import make_trained
from fsdp_models import SEQUENCE, VOCABULARY, make_batch, make_model
from fsdp_runs import LIMIT_S, difference, mesh_of
from torch import nn

from fusco import Settings, fsdp


class Captioner(nn.Module):
    """A language model that gets an image in place of its first token, or none.

    Blocks have a part for images as well, as Hugging Face models with separate layers for images.
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = make_model("qwen3")
        self.vision = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 16))
        for layer in self.text.model.layers:
            layer.mlp = WithImages(layer.mlp)

    def forward(self, ids: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
        embedded = self.text.get_input_embeddings()(ids)
        if image is not None:
            embedded = torch.cat([self.vision(image).expand(len(ids), 1, -1), embedded[:, 1:]], dim=1)
        for layer in self.text.model.layers:
            layer.mlp.has_image = image is not None
        logits = self.text(inputs_embeds=embedded).logits
        return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), ids.reshape(-1), reduction="sum")


class WithImages(nn.Module):
    """A MoE block, with an additional layer for batches with images."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.moe, self.more, self.has_image = moe, nn.Linear(16, 16), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(x) + self.more(x) if self.has_image else self.moe(x)


class Qwen3VL(nn.Module):
    """The model of transformers, with an image of 2 x 2 patches, which are one token, or none.

    Three of its blocks of the text get features of the image in addition to its token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = make_trained(transformers.Qwen3VLMoeForConditionalGeneration, torch.float32)
        config = self.model.config
        self.image_id, config.video_token_id, config.vision_start_token_id = config.image_token_id, 4, 5

    def forward(self, ids: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
        ids, images = ids.clamp(min=6), {}
        if image is not None:
            ids = torch.cat([torch.tensor([[5, self.image_id]]).expand(len(ids), 2), ids[:, 2:]], dim=1)
            vision = self.model.config.vision_config
            pixels = image.repeat(4, 3 * vision.temporal_patch_size * vision.patch_size**2 // len(image) + 1)
            pixels = pixels[:, : 3 * vision.temporal_patch_size * vision.patch_size**2]
            images = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 2]])}
            images["mm_token_type_ids"] = (ids == self.image_id).long()
        logits = self.model(input_ids=ids, use_cache=False, **images).logits
        return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), ids.reshape(-1), reduction="sum")


def differences_with_images(
    _: dist.ProcessGroup, kind: type[nn.Module], has_image: tuple[bool, ...]
) -> dict[str, float]:
    """Return differences of gradients from one process; some batches have an image."""
    expected = kind()
    image = torch.linspace(-1, 1, 5)
    batches = [make_batch(rank, 1) for rank in range(len(has_image))]
    for batch, with_image in zip(batches, has_image, strict=True):
        expected(batch.ids, image if with_image else None).backward()
    mesh, rank = mesh_of(2, 1), dist.get_rank()
    with fsdp.FuscoDispatcher(mesh.ep_group, SEQUENCE, settings=Settings(timeout_s=LIMIT_S / 4)) as dispatcher:
        model = kind()
        fsdp.parallelize(model, mesh, dispatcher)
        model(batches[rank].ids, image if has_image[rank] else None).backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        name: difference(grads[name], torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, parameter in expected.named_parameters()
    }
