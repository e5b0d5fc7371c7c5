"""Train with activations in pinned host memory, over all idle PCIe links: python examples/offload_activations.py.

Without a GPU activations stay where they are; with one, or without NVLink, copies take its own link. It says which.
"""

import contextlib
import time

import torch

import fusco

device = "cuda" if torch.cuda.is_available() else "cpu"
width, rows = (8192, 16384) if device == "cuda" else (64, 128)


def train(hooks: fusco.offload.offload_activations | None) -> tuple[list[float], float, float]:
    """Return the losses of six steps, the milliseconds of the last one, and the peak of memory on the GPU in GB."""
    torch.manual_seed(0)
    with torch.device(device):
        layers = [layer for _ in range(8) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
        model = torch.nn.Sequential(*layers).to(torch.bfloat16)
        x, target = torch.randn(2, rows, width, dtype=torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses, milliseconds = [], 0.0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(6):
        start = time.perf_counter()
        with hooks or contextlib.nullcontext():
            loss = (model(x) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the step
        milliseconds = 1e3 * (time.perf_counter() - start)
    return losses, milliseconds, torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0


expected, plain_ms, plain_gb = train(None)
hooks = fusco.offload.offload_activations()
losses, offloaded_ms, offloaded_gb = train(hooks)
assert losses == expected, (losses, expected)  # bit-identical
reason = (
    fusco.offload.copier_of(0).reason if device == "cuda" else "there is no GPU, so activations stay where they are"
)
print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}, the same with and without; {hooks.num_bytes / 1e9:.1f} GB moved")
print(
    f"plain: {plain_ms:.0f} ms a step, peak {plain_gb:.1f} GB; offloaded: {offloaded_ms:.0f} ms, {offloaded_gb:.1f} GB"
)
print(f"links: {reason or 'this GPU and idle ones'}")
