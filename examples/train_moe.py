"""Train a small Qwen3-MoE with expert parallelism on FSDP2. Run with torchrun --nproc-per-node 4 train_moe.py."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from fusco import fsdp

NUM_SEQUENCES, LENGTH = 4, 64

if "LOCAL_RANK" not in os.environ:
    raise SystemExit("start it with torchrun: torchrun --nproc-per-node 4 examples/train_moe.py")

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
rank = dist.get_rank()

torch.manual_seed(0)  # every rank starts from the same weights
config = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
)
model = Qwen3MoeForCausalLM(config)  # parallelize puts each rank's part on its device

# On GPUs experts are one grouped GEMM in bfloat16 only.
narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
sharding = fsdp.Sharding(mixed_precision=narrow if device == "cuda" else MixedPrecisionPolicy())
mesh = fsdp.build_mesh(ep_size=2)
with fsdp.FuscoDispatcher(mesh.ep_group, max_tokens_per_rank=NUM_SEQUENCES * LENGTH) as dispatcher:
    fsdp.parallelize(model, mesh, dispatcher, sharding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1 + rank)  # but draws different batches: numbers that count up from a random one
    for step in range(20):
        first = torch.randint(256, (NUM_SEQUENCES, 1), device=device)
        ids = (first + torch.arange(LENGTH + 1, device=device)) % 256
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss_sum = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"
        )
        loss = fsdp.scale_loss(loss_sum, NUM_SEQUENCES * LENGTH, mesh)
        loss.backward()
        norm = fsdp.clip_grad_norm_(model.parameters(), max_norm=1.0)
        dispatcher.synchronize()  # raises if a rank failed, before its gradients are used
        optimizer.step()
        optimizer.zero_grad()
        mean = fsdp.global_sum(loss, mesh)
        if rank == 0:
            sys.stdout.write(f"step {step:2d}  loss {mean.item():.3f}  gradient norm {norm.item():.3f}\n")
dist.destroy_process_group()
