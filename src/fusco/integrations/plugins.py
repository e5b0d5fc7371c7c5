"""Entry points that vLLM and SGLang call in each of their processes; they do nothing unless a user names them.

Both load the plugins of all installed packages, unless a variable lists those to load. Here the variable must list
``fusco``: that fusco is installed changes nothing.
"""

from __future__ import annotations

import os

_NAME = "fusco"


def load_into_vllm() -> None:
    """Register with vLLM if ``VLLM_PLUGINS`` lists fusco."""
    if _is_listed("VLLM_PLUGINS"):
        from fusco.integrations import vllm  # noqa: PLC0415  imports the framework

        vllm.register()


def load_into_sglang() -> None:
    """Register with SGLang if ``SGLANG_PLUGINS`` lists fusco."""
    if _is_listed("SGLANG_PLUGINS"):
        from fusco.integrations import sglang  # noqa: PLC0415

        sglang.register()


def _is_listed(variable: str) -> bool:
    return _NAME in (name.strip() for name in os.environ.get(variable, "").split(","))
