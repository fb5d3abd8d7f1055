"""UlyssesAttention over cut tensors on the ranks of a pool, against whole attention in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.oracle import Gradients, attention_gradients
from tests.support.pool import run_ranks
from ulysses_mc import SequenceLayout
from ulysses_mc.layers import UlyssesAttention

BY_SEQUENCE = ("out", "query", "key", "value")
# Inputs that every rank holds whole: the oracle's name for each option. Gradients add up.
WHOLE = {"attention_bias": "bias", "alibi_slopes": "alibi_slopes", "sinks": "sinks"}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def draw_qkv(
    b: int, s: int, heads: int, kv: int, d: int = 4, dv: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((heads, d), (kv, d), (kv, d if dv is None else dv))
    return tuple(draw(b, s, h, e, seed=seed + i) for i, (h, e) in enumerate(sizes))  # type: ignore[return-value]


def attend_on_rank(
    tensors: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor,
    layout: SequenceLayout,
    kv_layout: SequenceLayout | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    local_attention: Callable[..., Tensor] | None = None,
    transport: str = "auto",
    **options: Any,
) -> dict[str, Tensor]:
    """This rank's output, the gradients of its tokens, and its shares of the WHOLE ones."""
    group = group or dist.group.WORLD
    rank = group.rank()
    dim = grad_out.dim() - 3
    layouts = (layout, kv_layout or layout, kv_layout or layout)
    leaves = {
        name: cut.shard(tensor, dim, rank).clone().requires_grad_()
        for name, tensor, cut in zip(BY_SEQUENCE[1:], tensors, layouts, strict=True)
    }
    for name in WHOLE.keys() & options.keys():
        leaves[WHOLE[name]] = options[name] = options[name].clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that heads are uneven
        attention = UlyssesAttention(
            group,
            layout,
            kv_sequence_layout=kv_layout,
            local_attention=local_attention,
            transport=transport,
        )
        out = attention(leaves["query"], leaves["key"], leaves["value"], **options)
    grads = torch.autograd.grad(out, list(leaves.values()), layout.shard(grad_out, dim, rank))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def whole(
    results: list[Mapping[str, Tensor]],
    layout: SequenceLayout,
    kv_layout: SequenceLayout | None = None,
) -> dict[str, Tensor]:
    """All ranks' results as those of one process."""
    dim = results[0]["out"].dim() - 3
    together = {}
    for name in results[0]:
        parts = [result[name] for result in results]
        if name in BY_SEQUENCE:
            cut = layout if name in ("out", "query") else kv_layout or layout
            together[name] = cut.unshard(parts, dim)
        else:
            together[name] = torch.stack(parts).sum(0)
    return together


def assert_close(actual: Mapping[str, Tensor], expected: Gradients, dtype: torch.dtype) -> None:
    """Each result within its dtype's tolerance, relative to the largest expected value."""
    for name, value in actual.items():
        right = getattr(expected, name)
        assert value.shape == right.shape, f"{name}: {value.shape} is not {right.shape}"
        if not right.numel():
            continue
        limit = TOLERANCE[dtype] * max(1.0, right.abs().max().item())
        worst = (value.double() - right).abs().max().item()
        assert worst <= limit, f"{name} is off by {worst:.3g}, allowed {limit:.3g}"  # NaN fails too


def oracle_options(options: Mapping[str, Any]) -> dict[str, Any]:
    names = {"attention_mask": "allowed", "attention_bias": "bias"}
    return {names.get(name, name): option for name, option in options.items()}


def check_against_oracle(
    ranks: int,
    tensors: tuple[Tensor, Tensor, Tensor],
    layout: SequenceLayout | None = None,
    kv_layout: SequenceLayout | None = None,
    *,
    transport: str = "auto",
    local_attention: Callable[..., Tensor] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Runs `ranks` ranks and compares the output and every gradient; returns them, whole."""
    query, _, value = tensors
    layout = layout or SequenceLayout.contiguous(query.size(-3), ranks)
    grad_out = draw(*query.shape[:-1], value.size(-1), seed=99, dtype=query.dtype)
    results = run_ranks(
        ranks,
        attend_on_rank,
        tensors,
        grad_out,
        layout,
        kv_layout,
        transport=transport,
        local_attention=local_attention,
        **options,
    )
    together = whole(results, layout, kv_layout)
    assert_close(
        together, attention_gradients(*tensors, grad_out, **oracle_options(options)), query.dtype
    )
    return together
