"""Verbs under ``torch.compile``, which ends its graph before a call and begins another after it; and their limits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from fusco.core.config import Settings

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_OF_TWO_RANKS = ("gather_send", "scatter_recv")


def uncompiled(verb: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return a verb that ``torch.compile`` calls and does not trace: it waits for other ranks, and keeps state.

    ``torch.compiler.disable`` would import the compiler with fusco (0.7 s), and takes twice the 0.2 us of this.
    """

    @functools.wraps(verb)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if is_dynamo_compiling():
            return torch.compiler.disable(verb)(*args, **kwargs)  # type: ignore[no-untyped-call]
        return verb(*args, **kwargs)

    return call


def limited(verb: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return a verb of a communicator, ``uncompiled``, whose waits are limited to its ``timeout_s``, if it is given.

    The verb itself has nothing to do with that argument. A collective rejects a bad one, as it does other input.
    """
    is_collective = verb.__name__ not in _OF_TWO_RANKS

    @uncompiled
    def within_limit(*args: Any, **kwargs: Any) -> Any:
        comm, timeout_s = args[0], kwargs.get("timeout_s")
        if timeout_s is None:
            return verb(*args, **kwargs)
        with comm.rejecting() if is_collective else nullcontext():
            Settings(timeout_s=timeout_s)  # checks it
        with comm.limit(timeout_s):
            return verb(*args, **kwargs)

    @functools.wraps(verb)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        run = within_limit if "timeout_s" in kwargs or is_dynamo_compiling() else verb
        return run(*args, **kwargs)

    return call
