"""Attention over whole sequences on one rank: what runs between the two exchanges.

A local attention is any callable

    (query [b, s, h, d], key [b, s_kv, k, d], value [b, s_kv, k, d_v], *, causal, ...)
        -> [b, s, h, d_v]

that takes as keywords the options it can do: `scale`, `dropout_p`, `window` (left, right),
`cu_seqlens`, `cu_seqlens_kv`, `attention_mask`, `attention_bias`, `alibi_slopes`, `sinks`,
`softcap`, `deterministic`. An option is passed only if the caller gave it; one that the callable
does not take is refused before anything is sent.

It may have an attribute `check_before_exchange(query, key, value, options)`, called on every rank
before anything is sent, with this rank's tensors and the options of all heads: what the attention
cannot do on this machine or for these types and head dimensions, it refuses there. (A rank that
will hold no heads calls the attention too, with one head of zeros and without gradients, so that
an error raised later is raised by all.)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .flash import flash_attention
    from .flex import flex_attention
    from .sdpa import sdpa_attention

# Name -> module that defines it; FlexAttention pulls in the compiler only for those who use it.
_EXPORTS = {"flash_attention": "flash", "flex_attention": "flex", "sdpa_attention": "sdpa"}
__all__ = ["flash_attention", "flex_attention", "sdpa_attention"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
