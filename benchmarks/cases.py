"""What is measured: shapes, and the local attention that all contenders share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ulysses_mc import HeadLayout

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One table: a shape, a number of ranks and a local attention.

    Args:
        ranks: size P of the Ulysses group.
        heads, kv_heads, head_dim, batch_size: h, k, d, b.
        local_tokens: tokens of each rank before the exchange.
        attention: "none" (its outputs and gradients are prepared beforehand, so that only the
            exchange is timed) or "sdpa".
    """

    ranks: int
    heads: int
    kv_heads: int
    local_tokens: int
    attention: str = "none"
    head_dim: int = 64
    batch_size: int = 1

    @property
    def layout(self) -> HeadLayout:
        return HeadLayout(self.heads, self.kv_heads, self.ranks)

    @property
    def local_q_bytes(self) -> int:
        """Bytes of one rank's query, float32."""
        return 4 * self.batch_size * self.local_tokens * self.heads * self.head_dim

    @property
    def bound_bytes(self) -> int:
        """Least bytes that all ranks together receive in a forward and a backward pass."""
        lengths = (self.local_tokens,) * self.ranks
        shape: dict[str, int] = {"batch_size": self.batch_size, "head_dim": self.head_dim}
        layout = self.layout
        forward = sum(
            layout.bytes_received(rank, lengths, element_size=4, **shape)
            for rank in range(self.ranks)
        )
        return 2 * forward

    @property
    def title(self) -> str:
        kind = "MHA" if self.heads == self.kv_heads else "GQA"
        return (
            f"{kind} {self.heads}/{self.kv_heads} heads, {self.ranks} ranks, local Q "
            f"{self.local_q_bytes / MIB:g} MiB, "
            + ("no attention" if self.attention == "none" else "SDPA, causal")
        )

    def inputs(self, rank: int) -> list[torch.Tensor]:
        """This rank's q, k, v [b, s_r, ., d] (leaves) and the gradient of its output."""
        generator = torch.Generator().manual_seed(1234 + rank)
        tensors = [
            torch.randn(
                self.batch_size, self.local_tokens, heads, self.head_dim, generator=generator
            )
            for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]
        return [tensor.requires_grad_(number < 3) for number, tensor in enumerate(tensors)]


def tokens_for(local_q_mib: float, heads: int, head_dim: int = 64, batch_size: int = 1) -> int:
    """Tokens per rank whose float32 query has `local_q_mib` MiB."""
    return max(1, int(local_q_mib * MIB / (4 * batch_size * heads * head_dim)))


def default_cases(ranks: int, sizes_mib: list[float], sdpa_mib: float) -> Iterator[Case]:
    """MHA, GQA, and GQA with fewer key/value heads than ranks (from 4 ranks on)."""
    head_counts = [(16, 16), (16, 4)] + ([(16, ranks // 2)] if ranks >= 4 else [])
    for mib in sizes_mib:
        for heads, kv_heads in head_counts:
            yield Case(ranks, heads, kv_heads, tokens_for(mib, heads))
    if sdpa_mib:
        for heads, kv_heads in head_counts[:2]:
            yield Case(ranks, heads, kv_heads, tokens_for(sdpa_mib, heads), "sdpa")


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention, [b, s, h, d] in and out."""
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        is_causal=True,
        enable_gqa=query.size(2) != key.size(2),
    )
    return out.transpose(1, 2)


class Prepared:
    """An attention that costs nothing: outputs and gradients lie ready, contiguous.

    What a real kernel returns is contiguous too, so no contender is spared or given a copy that
    it would not make around a real one. Inputs may have any shapes; the output has `out_shape`
    or that of the query.
    """

    def __init__(self) -> None:
        self._ready: dict[tuple[str, torch.Size], torch.Tensor] = {}

    def tensor(self, name: str, shape: torch.Size) -> torch.Tensor:
        if (name, shape) not in self._ready:
            self._ready[name, shape] = torch.randn(shape)
        return self._ready[name, shape]

    def __call__(self, *inputs: torch.Tensor, out_shape: Any = None) -> torch.Tensor:
        shape = inputs[0].shape if out_shape is None else torch.Size(out_shape)
        out: torch.Tensor = _Prepared.apply(self, shape, *inputs)
        return out


class _Prepared(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ready: Prepared, out_shape: torch.Size, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.ready, ctx.shapes = ready, [tensor.shape for tensor in inputs]
        return ready.tensor("out", out_shape).detach()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        tensors = [ctx.ready.tensor(f"d{n}", shape) for n, shape in enumerate(ctx.shapes)]
        return (None, None, *tensors)
