"""Attention over whole sequences on one rank: what runs between the two exchanges.

A local attention is any callable

    (query [b, s, h, d], key [b, s_kv, k, d], value [b, s_kv, k, d_v], *, causal, ...)
        -> [b, s, h, d_v]

that takes as keywords the options it can do: `scale`, `dropout_p`, `window` (left, right),
`cu_seqlens`, `attention_mask`, `attention_bias`, `alibi_slopes`, `sinks`, `softcap`. An option
is passed only if the caller gave it.
"""

from .sdpa import sdpa_attention

__all__ = ["sdpa_attention"]
