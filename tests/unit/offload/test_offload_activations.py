"""Activations in host memory: bit-identical gradients, what stays, limits, and tensors that are written too early."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusco.offload import offload_activations
from fusco.offload.activations import is_dense

ROOT = Path(__file__).resolve().parents[3]


class LateCopy:
    """A copy that happens when it is waited for, or when the test says so."""

    def __init__(self, to, source, log, name):
        self._to, self._source, self._log, self._name = to, source, log, name
        self.is_done = False

    def finish(self):
        if not self.is_done:
            self._to.copy_(self._source)
            self.is_done = True

    def wait(self):
        self._log.append(("wait", self._name))
        self.finish()

    synchronize = wait


class LateMover:
    """Moves CPU tensors; memory is poisoned until the copy has happened."""

    def __init__(self, finishes=False):
        self.log, self.copies, self.finishes = [], [], finishes

    def is_movable(self, tensor):
        return tensor.dtype == torch.float32

    def _copy(self, source, name):
        to = torch.full_like(source, float("nan"))
        copy = LateCopy(to, source, self.log, name)
        self.log.append((name, source.numel()))
        self.copies.append(copy)
        if self.finishes:
            copy.finish()
        return to, copy

    def to_host(self, flat):
        return self._copy(flat, "to")

    def from_host(self, pinned, device):
        return self._copy(pinned, "from")


def model_of(num_layers=4, width=16):
    torch.manual_seed(1)
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(num_layers)]
    return torch.nn.Sequential(*layers)


def gradients(hooks):
    model, x = model_of(), torch.randn(8, 16, generator=torch.Generator().manual_seed(2))
    if hooks is None:
        model(x).square().mean().backward()
    else:
        with hooks:
            loss = model(x).square().mean()
        loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("finishes", [False, True])
@pytest.mark.parametrize("limits", [{}, {"prefetch_bytes": 0}, {"max_pending_bytes": 0}, {"max_pending_bytes": 1024}])
def test_gradients_are_bit_identical(finishes, limits):
    mover = LateMover(finishes)
    hooks = offload_activations(min_bytes=4, mover=mover, **limits)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(gradients(hooks), gradients(None), strict=True))
    moved = [numel for name, numel in mover.log if name == "to"]
    assert moved == [128] * len(moved)
    assert 16 <= len(moved) <= 20  # inputs and outputs of each layer, twice; none of the weights, nor any tensor twice
    assert hooks.num_bytes == 4 * sum(moved)
    if finishes or limits.get("max_pending_bytes") == 0:
        assert len([1 for name, _ in mover.log if name == "from"]) >= len(moved) - 2


def test_tensors_return_ahead_of_backward():
    mover = LateMover(finishes=True)
    hooks = offload_activations(min_bytes=4, mover=mover, prefetch_bytes=2 * 512, max_pending_bytes=0)
    gradients(hooks)
    names = [name for name, _ in mover.log]
    first_wait = names.index("wait", names.index("from"))
    assert names[:first_wait].count("from") >= 2
    ahead = offload_activations(min_bytes=4, mover=LateMover(finishes=True), prefetch_bytes=0, max_pending_bytes=0)
    gradients(ahead)
    one_by_one = [name for name, _ in ahead._mover.log if name in ("from", "wait")]
    returning = one_by_one[one_by_one.index("from") :]
    assert returning == ["from", "wait"] * (len(returning) // 2)


def test_forward_waits_while_too_much_has_not_left():
    mover = LateMover()
    hooks = offload_activations(min_bytes=4, mover=mover, max_pending_bytes=3 * 512)
    with hooks:
        out = model_of()(torch.randn(8, 16))
    assert sum(not copy.is_done for copy in mover.copies) == 3
    assert len(mover.copies) > 6
    out.sum().backward()


def test_what_stays_on_the_gpu():
    mover = LateMover()
    weight = torch.nn.Parameter(torch.randn(16, 16))
    x = torch.randn(16, 16)
    with offload_activations(min_bytes=1024, mover=mover, keeps=lambda tensor: tensor.data_ptr() == x.data_ptr()):
        y = x @ weight.t() @ weight[:, :8]  # x, views of a parameter
        (y[:, :4] * y[:, 4:]).double().exp().sum().backward()  # memory with gaps, another dtype, a small one
    assert [numel for name, numel in mover.log if name == "to"] == [256]  # x @ weight.t()


def test_permuted_tensors_keep_their_strides():
    x = torch.randn(4, 6, 8, requires_grad=True)
    with offload_activations(min_bytes=4, mover=LateMover(finishes=True), max_pending_bytes=0):
        (y := x.permute(2, 0, 1) * 2).square().sum().backward()
    assert y.stride() == (1, 48, 8)
    assert torch.equal(x.grad, 8 * x.detach())


class RawMover(LateMover):
    """Copies bytes at once, as the driver does, of tensors of any dtype."""

    def is_movable(self, tensor):
        return True

    def _copy(self, source, name):
        to = torch.empty(source.shape, dtype=source.dtype)
        ctypes.memmove(to.data_ptr(), source.data_ptr(), source.nbytes)
        self.copies.append(copy := LateCopy(to, source, self.log, name))
        copy.is_done = True
        return to, copy


@pytest.mark.parametrize("view", [torch.conj, lambda x: torch._neg_view(x.abs())], ids=["conjugated", "negated"])
def test_views_that_change_values_as_they_are_read_give_the_same_gradients(view):
    def gradient(hooks):
        x = torch.randn(64, dtype=torch.complex64, generator=torch.Generator().manual_seed(3)).requires_grad_()
        with hooks:
            y = view(x * 1)
            (y * y).abs().sum().backward()
        return x.grad

    mover = RawMover()
    hooks = offload_activations(min_bytes=4, mover=mover, max_pending_bytes=0)
    assert torch.equal(gradient(hooks), gradient(contextlib.nullcontext()))
    assert mover.copies  # others have left


def test_subclasses_stay():
    class Own(torch.Tensor):
        pass

    assert not is_dense(torch.zeros(4).as_subclass(Own))


def test_a_tensor_that_is_written_before_it_has_left():
    x = torch.randn(64, requires_grad=True)
    with offload_activations(min_bytes=4, mover=LateMover()):
        y = x * 2
        z = y.sin()
        y.add_(1)
    with pytest.raises(
        RuntimeError, match=r"a tensor of shape \(64,\) that autograd saved was written in place before"
    ):
        z.sum().backward()


def test_a_tensor_that_is_written_after_it_has_left():
    x = torch.randn(64, requires_grad=True)
    with offload_activations(min_bytes=4, mover=LateMover(finishes=True), max_pending_bytes=0):
        y = x * 2
        z = y.sin()
        y.square()  # another tensor is saved, so y is let go
        torch.nn.functional.gelu(x * 3)
        expected = 2 * y.detach().cos()
        y.add_(1)
    z.sum().backward()
    assert torch.equal(x.grad, expected)


def test_wrong_limits():
    with pytest.raises(ValueError, match="min_bytes must be positive, got 0"):
        offload_activations(min_bytes=0)
    with pytest.raises(ValueError, match="prefetch_bytes must"):
        offload_activations(prefetch_bytes=-1)


def test_dense():
    assert is_dense(torch.empty(2, 1, 3).permute(2, 1, 0))
    assert not is_dense(torch.empty(4, 4)[::2])
    assert not is_dense(torch.empty(3, 3).to_sparse())


def test_the_example_runs_without_a_gpu():
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "examples/offload_activations.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "links: there is no GPU, so activations stay where they are" in done.stdout
