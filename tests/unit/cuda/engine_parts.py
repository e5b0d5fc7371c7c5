"""CUDA engines of some parts only, for what the others have no share in."""

from __future__ import annotations

from typing import Any

from fusco.cuda.engine import CudaEngine


def engine_of(**parts: Any) -> CudaEngine:
    """Return an engine with these attributes, without leading underscore, and no others; functions replace methods."""
    engine = object.__new__(CudaEngine)
    engine.__dict__.update({f"_{name}": part for name, part in {"captured": [], **parts}.items()})
    return engine
