"""Bytes that one transformer layer keeps for backward, per GPU and micro-batch.

Source of the counts: Korthikanti et al., arXiv 2205.05198, section 4, with the MLP width and
the key/value heads written out. `t` below is the GPU's tokens, s/(P R) x b; e bytes an element.
"""

from __future__ import annotations

from dataclasses import dataclass

from .job import Job, Setting
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


def layer_activations(job: Job, setting: Setting, *, moe: bool = False) -> LayerActivations:
    """The bytes of one dense layer, or of one MoE layer with evenly loaded experts."""
    model, e, t = job.model, job.element_size, tokens_per_rank(job, setting)
    tp, h = setting.tp, model.hidden_size
    # Norms, residuals and dropout masks: on every TP rank, unless they are sharded over them.
    shared = t * h / (tp if job.tp_sequence_sharding else 1)
    mask = shared if model.hidden_dropout else 0.0
    q, v = model.num_attention_heads / tp * model.head_dim, model.value_dim
    out = model.num_attention_heads / tp * v
    kv = kv_heads_per_rank(model, tp, setting.ulysses) * (model.head_dim + v)
    if model.mla:  # K and V are expanded to every query head; the latents are kept besides
        kv = model.num_attention_heads / tp * (model.head_dim + v)
        latent = model.mla.kv_lora_rank + model.mla.rope_head_dim + (model.mla.q_lora_rank or 0)
        shared_latent = t * latent * e * 2  # before and after its norm, on every TP rank
    else:
        shared_latent = 0.0
    # By-heads output for attention's backward, by-sequence output for the projection's.
    copies = 2 if setting.ulysses > 1 else 1
    attention = 2 * e * shared + mask + e * t * (q + kv + copies * out) + shared_latent
    softmax = 0.0
    if job.attention == "unfused":
        scores = t * job.seq_length / setting.ring * model.num_attention_heads / tp
        softmax = scores * (2 * e + 1 if model.hidden_dropout else e)
        if setting.recompute != "none":
            softmax = 0.0
    inner, work = _mlp_widths(job, setting, moe)
    mlp = 2 * e * shared + mask + e * t * inner
    if job.kernels == "plain":
        attention += _plain_norm(job, shared) + _plain_attention(job, setting, t)
        mlp += _plain_norm(job, shared)
        if model.gated_mlp and not moe:  # silu(gate), and up with its offset
            mlp += 2 * e * t * model.ffn_hidden_size / tp
    exchange = 2 * e * t * (q + kv + out) if setting.ulysses > 1 else 0.0
    residual = 2 * e * shared
    # FlashAttention's backward: dq summed in fp32; dK, dV of grouped heads once per query head.
    kernel = 4 * t * q + (
        2 * e * t * q if model.num_query_groups < model.num_attention_heads else 0
    )
    return LayerActivations(
        attention=attention,
        mlp=mlp,
        softmax=softmax,
        layer_input=e * shared,
        attention_work=residual + e * t * (q + kv + out) + kernel + softmax,
        mlp_work=residual + e * t * work,
        exchange=exchange,
    )


def _plain_norm(job: Job, shared: float) -> float:
    """What PyTorch's norms keep besides their input: statistics, and RMSNorm the unscaled result.

    Args:
        shared: elements of the norm's input on one GPU.
    """
    tokens = shared / job.model.hidden_size
    if job.model.layer_norm:
        return 2 * 4 * tokens
    return job.element_size * shared + 4 * tokens


def _plain_attention(job: Job, setting: Setting, t: float) -> float:
    """Rotary cosines and sines of queries and of keys; log-sum-exp of the attention's rows."""
    rotary = 4 * t / setting.micro_batch * job.model.head_dim * job.element_size
    rows = 4 * t * job.model.num_attention_heads / setting.tp
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
