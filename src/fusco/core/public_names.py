"""Public names of a package that load their modules when first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def public_names(package: str, folder: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package: the names that its stub imports.

    The stub, ``__init__.pyi`` in ``folder``, has nothing but lines ``from MODULE import NAME as NAME, ...``, by which
    type checkers and editors find the names, too.
    """
    name_to_module: dict[str, str] = {}
    with open(f"{folder}/__init__.pyi", encoding="utf-8") as stub:
        for statement in f"\n{stub.read()}".split("\nfrom ")[1:]:
            module, _, names = statement.partition(" import ")
            name_to_module.update(
                (name.split()[-1], module) for name in names.strip("()\n ").split(",") if name.strip()
            )

    def get(name: str) -> Any:
        if name not in name_to_module:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        importlib.import_module("fusco.core.requirements").check_torch()
        if name_to_module[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(name_to_module[name]), name)

    return get, lambda: sorted(name_to_module), list(name_to_module)
