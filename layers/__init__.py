"""Attention layers that run on whole sequences for a subset of the heads."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import UlyssesAttention
    from .huggingface import use_ulysses

# Public name -> module that defines it, so that Megatron is loaded only by those who use it.
_EXPORTS = {"UlyssesAttention": "attention", "use_ulysses": "huggingface"}
__all__ = ["UlyssesAttention", "use_ulysses"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
