"""torch.compile without a GPU: nothing is compiled before it is called."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

_compile: Callable[..., Any] = torch.compile


def compile_when_called(model: Callable[..., Any] | None = None, **options: Any) -> Any:
    """torch.compile, which compiles a function at its first call outside `megatron_on_cpu`.

    Megatron decorates dozens of small functions while it is imported, which loads all of
    PyTorch's compiler at every rank's start, for code that never runs compiled here. Modules and
    other callables go to torch.compile as they are.
    """
    if model is None:
        return functools.partial(compile_when_called, **options)
    if not inspect.isfunction(model):
        return _compile(model, **options)
    compiled: Callable[..., Any] | None = None

    @functools.wraps(model)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if torch.compile is compile_when_called or torch.compiler.is_compiling():
            return model(*args, **kwargs)
        if compiled is None:
            compiled = _compile(model, **options)
        return compiled(*args, **kwargs)

    return run
