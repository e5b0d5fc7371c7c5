"""Digest of a Python file and of all files that it imports from its package, for caches of compiled code."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def digest_of_sources(file: Path, package: Path) -> str:
    """Return a digest of a Python file and of all files of its package that it imports, directly or indirectly.

    ``package`` is the folder of the top-level package, whose name imports use. Raises ``OSError`` for a file that
    cannot be read, and ``SyntaxError`` for one that is not valid Python.
    """
    found, waiting = set[Path](), [file.resolve()]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imported_files(path, package.resolve())
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(f"{path.name}\n".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def _imported_files(path: Path, package: Path) -> tuple[Path, ...]:
    """Return the files of the package that a file imports by absolute names."""
    names = [name for node in _statements(ast.parse(path.read_bytes())) for name in _imported_names(node)]
    inside = [name.split(".")[1:] for name in names if name.split(".")[0] == package.name]
    candidates = [place for parts in inside for place in _places(package.joinpath(*parts))]
    return tuple(dict.fromkeys(place for place in candidates if place.is_file()))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a node, without a look into expressions, which would take most of the time."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, name, ()):
            yield child
            yield from _statements(child)


def _imported_names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _places(module: Path) -> tuple[Path, Path]:
    return module.with_name(f"{module.name}.py"), module / "__init__.py"
