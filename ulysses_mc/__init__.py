"""DeepSpeed-Ulysses (arXiv 2309.14509) composed with Megatron's tensor, pipeline and data
parallelism.

Letters in shape comments, here and everywhere in the package:
    s  tokens of the whole sequence          s_r  tokens that rank r holds
    b  micro-batch                           t    tokens of a packed batch
    h  query heads of a tensor-parallel rank h_r  query heads that rank r holds by heads
    k  key/value heads, likewise             k_r  key/value heads, likewise
    d  head dimension                        P    Ulysses group size, T tensor-parallel size
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a clone, `parallel_state/` and `layers/` lie beside this package rather than in it.
_root = Path(__file__).resolve().parent.parent
if (_root / "setup.py").is_file() and (_root / "parallel_state" / "__init__.py").is_file():
    __path__.append(str(_root))

if TYPE_CHECKING:
    from .batch import cu_seqlens_from_position_ids, shard_batch, shift_labels
    from .gradients import (
        average_replicated_gradients,
        clip_gradients,
        deepspeed_gradient_divisor,
        gradient_norm,
    )
    from .head_layout import HeadLayout
    from .loss import (
        cross_entropy,
        linear_cross_entropy,
        megatron_token_loss,
        token_count,
        token_mean_loss,
    )
    from .padding import pad_documents
    from .parallel_state.errors import HeadDivisibilityError, ParallelConfigError
    from .sequence_layout import SequenceLayout
    from .without_gpu import megatron_on_cpu

__version__ = "0.1.0"

# Public name -> module that defines it; loaded on first use, so that planning needs no torch.
_EXPORTS = {
    "HeadDivisibilityError": "parallel_state.errors",
    "HeadLayout": "head_layout",
    "ParallelConfigError": "parallel_state.errors",
    "SequenceLayout": "sequence_layout",
    "average_replicated_gradients": "gradients",
    "clip_gradients": "gradients",
    "cross_entropy": "loss",
    "cu_seqlens_from_position_ids": "batch",
    "deepspeed_gradient_divisor": "gradients",
    "gradient_norm": "gradients",
    "linear_cross_entropy": "loss",
    "megatron_on_cpu": "without_gpu",
    "megatron_token_loss": "loss",
    "pad_documents": "padding",
    "shard_batch": "batch",
    "shift_labels": "batch",
    "token_count": "loss",
    "token_mean_loss": "loss",
}
__all__ = [
    "HeadDivisibilityError",
    "HeadLayout",
    "ParallelConfigError",
    "SequenceLayout",
    "average_replicated_gradients",
    "clip_gradients",
    "cross_entropy",
    "cu_seqlens_from_position_ids",
    "deepspeed_gradient_divisor",
    "gradient_norm",
    "linear_cross_entropy",
    "megatron_on_cpu",
    "megatron_token_loss",
    "pad_documents",
    "shard_batch",
    "shift_labels",
    "token_count",
    "token_mean_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
