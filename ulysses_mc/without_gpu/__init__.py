"""Lets unmodified megatron-core (0.16.1, 0.19.2) build, train and checkpoint models without a GPU.

    with megatron_on_cpu():
        ...  # everything that touches Megatron: groups, model, optimizer, schedule, checkpoint

Megatron names the device in some two hundred places: `device="cuda"`, `.cuda()`,
`torch.cuda.current_device()`, streams, events, CUDA random states. Inside the context all of
these mean the CPU. Where TransformerEngine or apex is installed, their optimizer kernels give way
to the PyTorch code that Megatron itself falls back to, and TransformerEngine's DotProductAttention
runs by its PyTorch backend; its linear layers and norms have none. Outside nothing is changed, and
where CUDA is available the context does nothing at all.

Limits: the context holds for the thread that entered it (attributes are replaced for all
threads, the translation of devices is not); functions under torch.compile run eagerly, and one that
is decorated inside is compiled when it is first called outside; overlap of communication and
computation finds nothing to overlap.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from .compiling import compile_when_called
from .megatron_names import megatron_replacements
from .te_names import te_replacements
from .torch_names import CudaMeansCpu, torch_replacements

__all__ = ["megatron_on_cpu"]


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Makes Megatron run on the CPU until the context is left, also by an exception.

    May be nested. Does nothing if `torch.cuda.is_available()`.

    Raises:
        ImportError: megatron-core is not installed.
    """
    if torch.cuda.is_available():
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(torch, "compile", compile_when_called))
        # Listed before the first is made: this imports Megatron, which must not see them then.
        replacements = [*megatron_replacements(), *torch_replacements(), *te_replacements()]
        for owner, name, value in replacements:
            stack.enter_context(_replaced(owner, name, value))
        # Megatron compiles many small functions (bias + activation, ...). Compiling one for the
        # CPU needs a C++ compiler and takes half a minute: run them as they are written.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_without_fork_warning())
        stack.enter_context(CudaMeansCpu())
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute, and puts the very same object back, or removes what was not there."""
    existed = hasattr(owner, name)
    original = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if existed:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def _without_fork_warning() -> Iterator[None]:
    """Silences the tracker's remark, at every fork, that the CPU's random state has changed.

    On a GPU that would be a mistake; here the CPU's state is the one that the fork is for.
    """
    logger = logging.getLogger("megatron.core.tensor_parallel.random")

    def keep(record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
