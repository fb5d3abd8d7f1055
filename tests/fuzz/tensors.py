"""The tensors and options of a draw, whole and by tensor-parallel rank; the right results."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.draws import Draw, tokens
from tests.support.oracle import Gradients, attention, attention_gradients
from ulysses_mc import SequenceLayout

QKV = ("query", "key", "value")
GRADIENT = 0.7  # of an expanded gradient, the same everywhere
# Which dim of a tensor, from the end, has a query head each.
HEAD_DIM = {
    "query": -2,
    "out": -2,
    "grad_out": -2,
    "attention_mask": -3,
    "attention_bias": -3,
    "alibi_slopes": -1,
    "sinks": -1,
}


def layouts(draw: Draw) -> tuple[SequenceLayout, SequenceLayout]:
    layout = SequenceLayout(draw.layout)
    return layout, layout if draw.kv_layout is None else SequenceLayout(draw.kv_layout)


def whole_tensors(draw: Draw) -> dict[str, Tensor]:
    """All heads, all tokens (joint ones first or last, as in the whole sequence); the same on
    every rank."""
    generator = torch.Generator().manual_seed(draw.seed)
    s = draw.joint + tokens(draw.layout)
    s_kv = s if draw.kv_layout is None else draw.joint + tokens(draw.kv_layout)
    batch = () if draw.batch is None else (draw.batch,)
    sizes = {"b": draw.batch or 1, "h": draw.heads, "s": s, "u": s_kv, "1": 1}

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(getattr(torch, draw.dtype))

    tensors = {
        "query": normal(*batch, s, draw.heads, draw.head_dim),
        "key": normal(*batch, s_kv, draw.kv_heads, draw.head_dim),
        "value": normal(*batch, s_kv, draw.kv_heads, draw.value_dim),
        "grad_out": normal(*batch, s, draw.heads, draw.value_dim),
    }
    if draw.gradient == "expanded":
        tensors["grad_out"].fill_(GRADIENT)
    if draw.mask is not None:
        shape = [sizes[letter] for letter in draw.mask]
        tensors["attention_mask"] = torch.rand(shape, generator=generator) > 0.3
    if draw.bias is not None:
        tensors["attention_bias"] = normal(*(sizes[letter] for letter in draw.bias))
    if draw.slopes is not None:
        tensors["alibi_slopes"] = normal(*(sizes[letter] for letter in draw.slopes)).abs()
    if draw.sinks:
        tensors["sinks"] = normal(draw.heads)
    return tensors


def tensor_parallel_slice(draw: Draw, rank: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The heads of one tensor-parallel rank, as Megatron cuts them."""
    held = {}
    for name, tensor in tensors.items():
        if name in ("key", "value"):
            k = max(draw.kv_heads // draw.tensor, 1)
            start = rank * draw.kv_heads // draw.tensor
            held[name] = tensor.narrow(-2, start, k)
            continue
        dim, h = HEAD_DIM[name], draw.heads // draw.tensor
        by_head = tensor.dim() >= -dim and tensor.size(dim) == draw.heads
        held[name] = tensor.narrow(dim, rank * h, h) if by_head else tensor
    return held


def join_tensor_parallel(draw: Draw, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Results of all tensor-parallel ranks as one process has them; replicas add up."""
    joined = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        if name in ("key", "value"):
            replicas = max(draw.tensor // draw.kv_heads, 1)
            sums = [sum(pieces[i : i + replicas]) for i in range(0, draw.tensor, replicas)]
            joined[name] = torch.cat(sums, -2)
        elif name == "bias" and "h" not in (draw.bias or ""):
            joined[name] = torch.stack(pieces).sum(0)
        else:
            dim = HEAD_DIM["attention_bias" if name == "bias" else name]
            joined[name] = torch.cat(pieces, dim)
    return joined


def options(draw: Draw) -> dict[str, Any]:
    """What is no tensor by head; `cu_seqlens` in one of the forms that callers have."""
    given: dict[str, Any] = {
        "causal": draw.causal,
        "window": draw.window,
        "scale": draw.scale,
        "softcap": draw.softcap,
    }
    for name, lengths in (("cu_seqlens", draw.documents), ("cu_seqlens_kv", draw.kv_documents)):
        if lengths is None:
            continue
        boundaries = list(accumulate(lengths, initial=0))
        forms = (
            boundaries,
            torch.tensor(boundaries, dtype=torch.int32),
            torch.tensor([boundaries]),
        )
        given[name] = forms[draw.seed % len(forms)]
    return given


def own_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attention_mask: Tensor | None = None,
    attention_bias: Tensor | None = None,
    cu_seqlens: Any = None,
    cu_seqlens_kv: Any = None,
    **options: Any,
) -> Tensor:
    """A local attention as a user brings one, with every option and gradient."""
    cu, cu_kv = (
        c.flatten().tolist() if isinstance(c, Tensor) else c for c in (cu_seqlens, cu_seqlens_kv)
    )
    out = attention(
        query, key, value, allowed=attention_mask, bias=attention_bias,
        cu_seqlens=cu, cu_seqlens_kv=cu_kv, **options,
    )  # fmt: skip
    return out.to(query.dtype)


def expected(draw: Draw) -> Gradients:
    """Float64, one process, without the library."""
    tensors, given = whole_tensors(draw), options(draw)
    allowed = tensors.get("attention_mask")
    for name, lengths in (("cu_seqlens", draw.documents), ("cu_seqlens_kv", draw.kv_documents)):
        if lengths is not None:
            given[name] = list(accumulate(lengths, initial=0))
    if draw.documents is not None:  # to the oracle padding is a document, here it sees nothing
        inside = torch.arange(tensors["query"].size(-3)) < sum(draw.documents)
        allowed = inside[:, None] if allowed is None else allowed & inside[:, None]
    return attention_gradients(
        *(tensors[name] for name in QKV),
        tensors["grad_out"],
        allowed=allowed,
        bias=tensors.get("attention_bias"),
        alibi_slopes=tensors.get("alibi_slopes"),
        sinks=tensors.get("sinks"),
        **given,
    )
