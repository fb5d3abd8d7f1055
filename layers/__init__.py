"""Attention layers that run on whole sequences for a subset of the heads."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import UlyssesAttention
    from .core_attention import UlyssesCoreAttention
    from .dropout import wire_dropout
    from .fused import adam_in_use, norms_in_use
    from .huggingface import use_ulysses
    from .local.flash_backends import explain_backend
    from .norm import Norm
    from .packed import packed_seq_params
    from .rope import wire_rope
    from .spec_rewriting import with_norm, with_ulysses
    from .wiring import check_wired

# Public name -> module that defines it, so that Megatron is loaded only by those who use it.
_EXPORTS = {
    "Norm": "norm",
    "UlyssesAttention": "attention",
    "UlyssesCoreAttention": "core_attention",
    "adam_in_use": "fused",
    "check_wired": "wiring",
    "explain_backend": "local.flash_backends",
    "norms_in_use": "fused",
    "packed_seq_params": "packed",
    "use_ulysses": "huggingface",
    "wire_dropout": "dropout",
    "wire_rope": "rope",
    "with_norm": "spec_rewriting",
    "with_ulysses": "spec_rewriting",
}
__all__ = [
    "Norm",
    "UlyssesAttention",
    "UlyssesCoreAttention",
    "adam_in_use",
    "check_wired",
    "explain_backend",
    "norms_in_use",
    "packed_seq_params",
    "use_ulysses",
    "wire_dropout",
    "wire_rope",
    "with_norm",
    "with_ulysses",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
