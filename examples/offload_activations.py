"""Train with activations in pinned host memory, over all idle PCIe links: python examples/offload_activations.py.

Without a GPU activations stay where they are; with one, or without NVLink, copies take its own link. It says which.
"""

import torch

import fusco

device = "cuda" if torch.cuda.is_available() else "cpu"
width, rows = (8192, 16384) if device == "cuda" else (64, 128)


def train(hooks: fusco.offload.offload_activations | None) -> tuple[list[float], float]:
    """Return the losses of three steps, and the peak of memory on the GPU in GB."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    losses = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        if hooks is None:
            loss = model(x).float().square().mean()
        else:
            with hooks:
                loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0


expected, peak = train(None)
hooks = fusco.offload.offload_activations()
losses, peak_offloaded = train(hooks)
assert losses == expected, (losses, expected)  # bit-identical
reason = (
    fusco.offload.copier_of(0).reason if device == "cuda" else "there is no GPU, so activations stay where they are"
)
print(f"losses {losses}; peak {peak:.1f} GB, offloaded {peak_offloaded:.1f} GB; {hooks.num_bytes / 1e9:.1f} GB moved")
print(f"links: {reason or 'this GPU and idle ones'}")
