"""A Mixture-of-Experts layer's communication in twenty lines: torchrun --nproc-per-node 4 examples/moe_layer.py."""

import torch
import torch.distributed as dist

import fusco

dist.init_process_group("gloo")  # under torchrun --nproc-per-node 4
torch.manual_seed(dist.get_rank())
x = torch.randn(512, 1024, dtype=torch.bfloat16, requires_grad=True)
topk_weights, topk_idx = torch.randn(512, 64).softmax(1).topk(8)

with fusco.Communicator(
    num_experts=64, num_topk=8, max_tokens_per_rank=512, max_bytes_per_token=2048, ranks_per_node=2
) as comm:
    sent = comm.dispatch(x, topk_idx, topk_weights)
    # Rows of this rank's 16 experts, one block after the other, as grouped matrix multiplication reads them.
    blocks = sent.rows.split(sent.num_rows_per_expert.tolist())
    y = torch.cat([block * (1 + expert) for expert, block in enumerate(blocks)])
    out = comm.combine(y, sent.handle)  # (512, 1024), weighted and summed over each token's experts
    out.float().sum().backward()  # gradients reach x and would reach topk_weights
    print(f"rank {comm.rank}: {len(sent.rows)} rows arrived for {len(blocks)} experts, {tuple(out.shape)} returned")
dist.destroy_process_group()
