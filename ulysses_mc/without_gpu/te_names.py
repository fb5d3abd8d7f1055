"""TransformerEngine's attention without a GPU: its own module, by its PyTorch ("unfused") backend.

TransformerEngine's other modules (GEMMs, norms, FP8) have kernels only; they can be built here,
not run. Packed sequences (thd) need a kernel too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"
# TransformerEngine asks the device for its compute capability before it looks at backends.
_NO_DEVICE = SimpleNamespace(
    name="none", major=9, minor=0, multi_processor_count=1, total_memory=2**34
)


def asked_by_te(depth: int) -> bool:
    """Whether the code that is `depth` calls up is TransformerEngine's."""
    name = sys._getframe(depth + 1).f_globals.get("__name__", "")
    return isinstance(name, str) and name.startswith("transformer_engine.")


def te_replacements() -> Iterator[tuple[Any, str, Any]]:
    cuda = torch.cuda
    # Its modules refuse to be built without CUDA; all others shall be told the truth.
    yield cuda, "is_available", _is_available_to_te
    yield cuda, "get_device_properties", _get_device_properties
    yield cuda, "get_device_capability", _get_device_capability
    yield cuda, "is_current_stream_capturing", _is_current_stream_capturing
    yield cuda.nvtx, "range_push", _range_push
    yield cuda.nvtx, "range_pop", _range_pop
    utils, backends = (sys.modules.get(f"{_ATTENTION}.{part}") for part in ("utils", "backends"))
    if utils is None or backends is None:  # not installed, or not used
        return
    select = utils.get_attention_backend
    yield utils, "get_attention_backend", _without_kernels(select)
    # A CUDA kernel for half precision, within the backend that has none otherwise.
    yield backends.FusedScaleMaskSoftmax, "is_kernel_available", _is_kernel_available


def _without_kernels(select: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """TransformerEngine's choice of a backend, from those that need no GPU.

    By its own switches, but only while it chooses: Megatron checks them against its config.
    """

    def select_unfused(attention_params: Any) -> Any:
        switches = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")
        before = {name: os.environ.get(name) for name in switches}
        os.environ.update(dict.fromkeys(switches, "0"))
        try:
            return select(attention_params)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    return select_unfused


def _is_available_to_te() -> bool:
    return asked_by_te(1)


def _get_device_properties(device: Any = None) -> SimpleNamespace:
    return _NO_DEVICE


def _get_device_capability(device: Any = None) -> tuple[int, int]:
    return _NO_DEVICE.major, _NO_DEVICE.minor


def _is_current_stream_capturing() -> bool:
    return False


def _range_push(message: str) -> None: ...


def _range_pop() -> None: ...


def _is_kernel_available(self: Any, mask: Any, *sizes: int) -> bool:
    return False
