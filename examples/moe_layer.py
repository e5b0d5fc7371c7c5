"""A Mixture-of-Experts layer's communication in thirty lines: torchrun --nproc-per-node 4 examples/moe_layer.py."""

import os

import torch
import torch.distributed as dist

import fusco

if "LOCAL_RANK" not in os.environ:
    raise SystemExit("start it with torchrun: torchrun --nproc-per-node 4 examples/moe_layer.py")
# On GPUs if this machine has one for each of its ranks.
local_rank, num_local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
device = f"cuda:{local_rank}" if torch.cuda.device_count() >= num_local_ranks else "cpu"
if device != "cpu":
    torch.cuda.set_device(device)
dist.init_process_group("gloo" if device == "cpu" else "nccl")
torch.manual_seed(dist.get_rank())
x = torch.randn(512, 1024, dtype=torch.bfloat16, device=device, requires_grad=True)
topk_weights, topk_idx = torch.randn(512, 64, device=device).softmax(1).topk(8)

with fusco.Communicator(num_experts=64, num_topk=8, max_tokens_per_rank=512, hidden=1024, device=device) as comm:
    sent = comm.dispatch(x, topk_idx, topk_weights)
    # Rows of this rank's experts, one block after the other, as grouped matrix multiplication reads them.
    blocks = sent.rows.split(sent.num_rows_per_expert.tolist())
    y = torch.cat([block * (1 + expert) for expert, block in enumerate(blocks)])
    out = comm.combine(y, sent.handle)  # (512, 1024), weighted and summed over each token's experts
    out.float().sum().backward()  # gradients reach x and would reach topk_weights
    where = f"rank {comm.rank}, {comm.topology.num_nodes} node(s)"
    print(f"{where}: {len(sent.rows)} rows arrived for {len(blocks)} experts, {tuple(out.shape)} returned")
dist.destroy_process_group()
