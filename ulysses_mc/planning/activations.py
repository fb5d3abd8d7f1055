"""Bytes that one transformer layer keeps for backward, per GPU and micro-batch.

Source of the counts: Korthikanti et al., arXiv 2205.05198, section 4, with the MLP width and
the key/value heads written out. `t` below is the GPU's tokens, s/(P R) x b; e bytes an element.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .job import Job, Setting, head_layout
from .model import ModelShape


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer for one micro-batch.

    Args:
        attention: kept from the input norm to the attention residual.
        mlp: kept from the second norm to the end of the layer.
        softmax: the quadratic part, 0 with flash attention.
        layer_input: what full recompute keeps.
        attention_work: gradients that live only during the attention's backward pass.
        mlp_work: gradients that live only during the MLP's.
        exchange: q, k, v and o by heads, and the packed copies that are sent.
    """

    attention: float
    mlp: float
    softmax: float
    layer_input: float
    attention_work: float
    mlp_work: float
    exchange: float

    @property
    def kept(self) -> float:
        return self.attention + self.mlp + self.softmax


def tokens_per_rank(job: Job, setting: Setting) -> float:
    """t: tokens of a micro-batch on one GPU before the exchange."""
    return job.seq_length / setting.cp * setting.micro_batch


def kv_heads_per_rank(model: ModelShape, tp: int, ulysses: int = 1) -> float:
    """n_k'/T: key/value heads of a TP rank, counted as often as the Ulysses ranks hold them."""
    return float(max(model.num_query_groups / tp, ulysses))


@lru_cache(maxsize=4096)
def busiest_heads(model: ModelShape, tp: int, ulysses: int) -> tuple[float, float]:
    """Query and key/value heads of the busiest Ulysses rank, times P: heads per token it sent.

    For an even layout h and k, the heads of its TP rank; more where runs differ in size, or
    heads are replicated.
    """
    layout = head_layout(model, tp, ulysses)
    if ulysses == 1 or isinstance(layout, Exception):
        return model.num_attention_heads / tp, kv_heads_per_rank(model, tp)
    query = ulysses * max(map(len, layout.query_heads))
    irregular = any(layout.kv_expansion(rank) is not None for rank in range(ulysses))
    return query, query if irregular else ulysses * max(map(len, layout.kv_heads))


def layer_activations(job: Job, setting: Setting, *, moe: bool = False) -> LayerActivations:
    """The bytes of one dense layer, or of one MoE layer with evenly loaded experts."""
    s, kept = setting, setting.recompute == "none" or job.attention != "unfused"
    return _of_layer(job, s.tp, s.ulysses, s.ring, s.micro_batch, moe and s.ep > 1, kept, moe)


@lru_cache(maxsize=1 << 14)
def _of_layer(
    job: Job, tp: int, ulysses: int, ring: int, micro_batch: int,
    divided_experts: bool, keeps_softmax: bool, moe: bool,
) -> LayerActivations:  # fmt: skip
    """From all that a layer depends on: not the pipeline, not dp, of ep whether there is one."""
    setting = Setting(
        tp=tp, ulysses=ulysses, ring=ring, micro_batch=micro_batch, ep=1 + divided_experts,
        recompute="none" if keeps_softmax else "full",
    )  # fmt: skip
    model, e, t = job.model, job.element_size, tokens_per_rank(job, setting)
    # Norms, residuals and dropout masks: on every TP rank, unless they are sharded over them.
    shared = t * model.hidden_size / (setting.tp if job.tp_sequence_sharding else 1)
    around = 2 * e * shared + (shared if model.hidden_dropout else 0.0)
    heads, kv_heads = busiest_heads(model, setting.tp, setting.ulysses)
    if model.mla:  # keys and values are expanded to every query head
        kv_heads = heads
    query, out = heads * model.head_dim, heads * model.value_dim
    by_heads = e * t * (query + kv_heads * (model.head_dim + model.value_dim) + out)
    attention = around + by_heads + _latents(job, t)
    if setting.ulysses > 1:  # and the output by sequence, for the projection's backward pass
        attention += e * t * model.num_attention_heads / setting.tp * model.value_dim
    inner, work = _mlp_widths(job, setting, moe)
    mlp = around + e * t * inner
    if job.kernels == "plain":
        attention += _plain_norm(job, shared) + _plain_attention(job, setting, t, heads)
        mlp += _plain_norm(job, shared)
        if model.gated_mlp and not moe:  # silu(gate), and up with its offset
            mlp += 2 * e * t * model.ffn_hidden_size / setting.tp
    softmax = _softmax(job, setting, t * heads)
    # FlashAttention's backward: dq summed in fp32; dK, dV of grouped heads once per query head.
    grouped = model.num_query_groups < model.num_attention_heads
    kernel = (4 + 2 * e * grouped) * t * query
    return LayerActivations(
        attention=attention,
        mlp=mlp,
        softmax=softmax,
        layer_input=e * shared,
        attention_work=2 * e * shared + by_heads + kernel + softmax,
        mlp_work=2 * e * shared + e * t * work,
        exchange=2 * by_heads if setting.ulysses > 1 else 0.0,
    )


def _latents(job: Job, t: float) -> float:
    """MLA's compressed queries and keys, before and after their norms, on every TP rank."""
    mla = job.model.mla
    if mla is None:
        return 0.0
    return (
        2 * job.element_size * t * (mla.kv_lora_rank + mla.rope_head_dim + (mla.q_lora_rank or 0))
    )


def _softmax(job: Job, setting: Setting, rows: float) -> float:
    """5 a s^2 b with dropout (softmax, its mask, their product), else the softmax alone."""
    if job.attention != "unfused" or setting.recompute != "none":
        return 0.0
    e = job.element_size
    return rows * job.seq_length / setting.ring * (2 * e + 1 if job.model.hidden_dropout else e)


def _plain_norm(job: Job, shared: float) -> float:
    """What PyTorch's norms keep besides their input: statistics, and RMSNorm the unscaled result.

    Args:
        shared: elements of the norm's input on one GPU.
    """
    tokens = shared / job.model.hidden_size
    if job.model.layer_norm:
        return 2 * 4 * tokens
    return job.element_size * shared + 4 * tokens


def _plain_attention(job: Job, setting: Setting, t: float, heads: float) -> float:
    """Rotary cosines and sines of queries and of keys; log-sum-exp of the attention's rows."""
    rotary = 4 * t / setting.micro_batch * job.model.head_dim * job.element_size
    rows = 4 * t * heads
    return (0.0 if job.model.learned_positions else rotary) + (
        rows if job.attention == "flash" else 0.0
    )


def _mlp_widths(job: Job, setting: Setting, moe: bool) -> tuple[float, float]:
    """Elements per token kept inside the MLP, and live as gradients in its backward pass.

    SwiGLU keeps gate, up and their product (3f), GELU its input and output (2f).
    """
    model, tp = job.model, setting.tp
    kept, live = (3, 2) if model.gated_mlp else (2, 1)
    if not (moe and model.moe):
        f = model.ffn_hidden_size / tp
        return kept * f, live * f
    # Evenly loaded experts: as many copies arrive as are sent, top_k of each token.
    width = (model.moe.top_k * model.moe.ffn_hidden_size + model.moe.shared_ffn_hidden_size) / tp
    # With experts divided by ep each TP rank routes its own share of the tokens.
    copies = model.moe.top_k * model.hidden_size / (tp if setting.ep > 1 else 1)
    return kept * width + 2 * copies, live * width + copies
