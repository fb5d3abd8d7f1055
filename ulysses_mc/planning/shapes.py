"""Shapes of every tensor on the way through one layer, on one rank, in Megatron's [s, b, h]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from .job import head_layout
from .run import Run


@dataclass(frozen=True)
class TensorShape:
    """A tensor of one rank.

    Args:
        step: what made it.
        shape: local sizes.
        meaning: the same in letters.
        collective: what moves just before it, '' if nothing.
    """

    step: str
    shape: tuple[int, ...]
    meaning: str
    collective: str = ""

    @property
    def elements(self) -> int:
        return prod(self.shape)


def layer_shapes(run: Run, ulysses_rank: int, *, last_stage: bool = True) -> list[TensorShape]:
    """The tensors of a layer on the rank at `ulysses_rank` of its group; then the logits."""
    shapes = [*_attention(run, ulysses_rank), *_mlp(run)]
    if last_stage:
        s, b = run.seq_length // (run.ulysses * run.ring), run.micro_batch_size
        shapes.append(TensorShape("logits", (s, b, run.model.vocab_size // run.tp),
                                  "s/(P R), b, V/T"))  # fmt: skip
    return shapes


def _residual(run: Run, step: str, collective: str = "") -> TensorShape:
    """A tensor of the residual stream: sharded over tp too with Megatron's sequence_parallel."""
    s, split = run.seq_length // (run.ulysses * run.ring), run.tp_sequence_sharding
    shape = (s // run.tp if split else s, run.micro_batch_size, run.model.hidden_size)
    return TensorShape(step, shape, f"s/(P R{' T' if split else ''}), b, h", collective)


def _whole(run: Run, step: str) -> TensorShape:
    """The same, gathered over tp for a column-parallel product."""
    s = run.seq_length // (run.ulysses * run.ring)
    gather = "all-gather over tp" if run.tp_sequence_sharding and run.tp > 1 else ""
    shape = (s, run.micro_batch_size, run.model.hidden_size)
    return TensorShape(step, shape, "s/(P R), b, h", gather)


def _reduce(run: Run) -> str:
    if run.tp == 1:
        return ""
    return f"{'reduce-scatter' if run.tp_sequence_sharding else 'all-reduce'} over tp"


def _attention(run: Run, ulysses_rank: int) -> Iterator[TensorShape]:
    model, b, tp = run.model, run.micro_batch_size, run.tp
    s, by_heads = run.seq_length // (run.ulysses * run.ring), run.seq_length // run.ring
    layout = head_layout(model, tp, run.ulysses)
    assert not isinstance(layout, Exception), layout
    h, k = layout.local_heads, layout.local_kv_heads
    d, v = model.head_dim, model.value_dim
    yield _residual(run, "hidden states")
    yield _residual(run, "input norm")
    if model.mla:
        latent = model.mla.kv_lora_rank + model.mla.rope_head_dim
        yield _whole(run, "down projections' input")
        yield TensorShape("compressed key/value", (s, b, latent), "s/(P R), b, rank + rope")
    else:
        yield _whole(run, "QKV product's input")
        yield TensorShape("mixed QKV", (s, b, h * d + k * (d + v)), "s/(P R), b, (n_q + 2 n_k) d/T")
    yield TensorShape("query", (s, b, h, d), "s/(P R), b, n_q/T, d")
    yield TensorShape("key", (s, b, k, d), "s/(P R), b, n_k/T, d")
    yield TensorShape("value", (s, b, k, v), "s/(P R), b, n_k/T, d_v")
    if run.ulysses > 1:
        q_r = len(layout.query_heads[ulysses_rank])
        k_r = len(layout.kv_heads[ulysses_rank])
        moved = "exchange over ulysses"
        yield TensorShape("query by heads", (by_heads, b, q_r, d), "s/R, b, n_q,r, d", moved)
        yield TensorShape("key by heads", (by_heads, b, k_r, d), "s/R, b, n_k,r, d", moved)
        yield TensorShape("value by heads", (by_heads, b, k_r, v), "s/R, b, n_k,r, d_v", moved)
        expansion = layout.kv_expansion(ulysses_rank)
        if expansion is not None:
            yield TensorShape("key expanded", (by_heads, b, len(expansion), d), "s/R, b, n_q,r, d")
            yield TensorShape("value expanded", (by_heads, b, len(expansion), v),
                              "s/R, b, n_q,r, d_v")  # fmt: skip
        yield TensorShape("context by heads", (by_heads, b, q_r, v), "s/R, b, n_q,r, d_v")
        yield TensorShape("context", (s, b, h * v), "s/(P R), b, n_q/T d_v", moved)
    else:
        yield TensorShape("context", (s, b, h * v), "s/(P R), b, n_q/T d_v")
    yield _residual(run, "attention output", _reduce(run))


def _mlp(run: Run) -> Iterator[TensorShape]:
    model, b = run.model, run.micro_batch_size
    s = run.seq_length // (run.ulysses * run.ring)
    yield _residual(run, "MLP norm")
    if model.moe:
        tokens = s * b // (run.tp if run.tp_sequence_sharding else 1)
        yield TensorShape("router logits", (tokens, model.moe.num_experts), "tokens, experts")
        copies = tokens * model.moe.top_k
        moved = "all-to-all over ep" if run.ep > 1 else ""
        yield TensorShape("routed tokens, evenly", (copies, model.hidden_size),
                          "tokens x top k, h", moved)  # fmt: skip
        etp = run.etp or run.tp
        wide = model.moe.ffn_hidden_size * (2 if model.gated_mlp else 1) // etp
        yield TensorShape("experts' first product", (copies, wide), "tokens x top k, 2f/T")
        yield _residual(run, "layer output", moved)
        return
    f = model.ffn_hidden_size // run.tp
    yield _whole(run, "MLP's input")
    if model.gated_mlp:
        yield TensorShape("gate and up", (s, b, 2 * f), "s/(P R), b, 2f/T")
    else:
        yield TensorShape("first product", (s, b, f), "s/(P R), b, f/T")
    yield TensorShape("activated", (s, b, f), "s/(P R), b, f/T")
    yield _residual(run, "layer output", _reduce(run))
