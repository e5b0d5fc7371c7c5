"""Every tensor that fusco makes says where it is: ``torch.set_default_device`` is for the caller's tensors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import fusco

PACKAGE = Path(fusco.__file__).parent
# What a default device moves, by PyTorch's list, and the constructors of tensors by type, which take no device.
FACTORIES = {factory.__name__ for factory in _device_constructors()} - {"nested_tensor"}
LEGACY = {"Tensor", *(f"{kind}Tensor" for kind in ("Bool", "Byte", "Char", "Double", "Float", "Int", "Long", "Short"))}
# Their dtype is PyTorch's default one unless it is given, whatever their arguments are.
FLOATING = {"empty", "ones", "zeros", "rand", "randn", "eye", "linspace", "logspace", "empty_strided"}


def careless_calls(source: str) -> list[str]:
    """The calls ``torch.FACTORY(...)`` in some code that leave device or dtype to PyTorch's defaults."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), keywords=keywords):
                given = {keyword.arg for keyword in keywords}
                needed = {"device"} if name in FACTORIES else set()
                needed |= {"dtype"} if name in FLOATING else set()
                if name in LEGACY or not needed <= given:
                    found.append(f"line {node.lineno}: {ast.unparse(node)}")
            case ast.ImportFrom(module="torch", names=names):
                found += [f"line {node.lineno}: import of {n.name}" for n in names if n.name in FACTORIES | LEGACY]
    return found


@pytest.mark.parametrize(
    ("source", "is_careless"),
    [
        ("torch.arange(3)", True),
        ("torch.arange(3, device='cpu')", False),
        ("torch.zeros(3, device='cpu')", True),
        ("torch.zeros(3, device='cpu', dtype=torch.int64)", False),
        ("torch.zeros(3, dtype=torch.int64).pin_memory()", True),
        ("f(g(torch.tensor([0])))", True),
        ("torch.FloatTensor([1.0])", True),
        ("from torch import arange", True),
        ("torch.empty_like(x), x.new_zeros(3), torch.from_numpy(x)", False),
    ],
)
def test_it_finds_what_it_looks_for(source, is_careless):
    assert bool(careless_calls(source)) == is_careless


def test_no_tensor_is_made_without_a_device():
    assert {"empty", "full", "arange", "tensor", "as_tensor", "rand", "randint", "scalar_tensor"} <= FACTORIES
    found = {str(path.relative_to(PACKAGE)): careless_calls(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 100
    assert {path: calls for path, calls in found.items() if calls} == {}
