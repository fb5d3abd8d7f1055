"""Seconds of a training step, part by part.

Compute: FLOPs / (peak x efficiency), where small matrix products reach less; everything between
them runs at the memory's speed. Communication: k x alpha + bytes / (bandwidth x efficiency).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from math import inf

from .activations import layer_activations, tokens_per_rank
from .job import Job, Setting, head_layout
from .memory import stage_layers, stage_parameters
from .model import ModelShape
from .traffic import Flow, layer_flows, stage_flows

# Fitted to arXiv 2205.05198, table 5 (A100), and kept for the others: see docs/planning.md.
HALF_FLOPS_SECONDS = 65e-6  # a product of peak x this many FLOPs reaches half of the efficiency
MEMORY_EFFICIENCY = 0.8
FP8_EFFICIENCY = 0.75  # of the bf16 efficiency: casts, scales, and the products left in bf16
SHORT_SEQUENCE = 1024  # tokens at which the attention kernel reaches half of its efficiency
UNFUSED_EFFICIENCY = 0.5  # batched products of one head's width, of a large product's efficiency
OVERLAP_LEFT = 0.2  # of tensor-parallel communication that tp_overlap leaves uncovered
OPTIMIZER_TRAFFIC = 30  # bytes read and written per parameter by Adam with fp32 states


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step; only what is not hidden behind something else."""

    matrices: float
    attention: float
    elementwise: float
    logits: float
    recompute: float
    tp: float
    ulysses: float
    ring: float
    ep: float
    pp: float
    bubble: float
    dp: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class _Layer:
    """Seconds of the mean layer's forward pass for one micro-batch."""

    matrices: float
    attention: float
    elementwise: float


def flow_seconds(job: Job, flow: Flow, nbytes: float, messages: float) -> float:
    """Time of `nbytes` of a flow over the links that its group spans."""
    intra = job.gpu.link("intra", flow.pattern)
    inter = job.gpu.link("inter", flow.pattern)
    if not flow.spans_nodes:
        return intra.seconds(messages, nbytes)
    if flow.pattern == "all_to_all":
        outside = nbytes * flow.outside
        inside = intra.seconds(messages, nbytes - outside)
        return max(inside, inter.seconds(messages, outside))
    # The rings of a collective use the network card of every member on the node.
    share = flow.per_node if flow.pattern == "ring" else 1
    return max(intra.seconds(messages, nbytes), inter.seconds(messages, nbytes, share=share))


def step_time(job: Job, setting: Setting) -> StepTime:
    """The time of one step. `stage_layers` must have accepted the setting."""
    split = stage_layers(job.model, setting)
    assert split is not None
    m, layer = setting.num_micro_batches(job.global_batch_size), _forward(job, setting)
    ends, layers = split
    by_kind = {flow.kind: flow for flow in stage_flows(job, setting)}
    compute = layer.matrices + layer.attention + layer.elementwise
    again = _recomputed(job, setting, layer)
    per_layer = _exposed(job, setting)
    logits = _logits(job, setting)
    # Every stage waits for the slowest: the one with the loss, unless the ends hold fewer layers.
    backward_compute = 2 * (layer.matrices + layer.elementwise) + _backward_attention(job, layer)
    whole = compute + backward_compute + again + sum(per_layer.values())
    logits = max(ends * whole + logits - layers * whole, 0.0)
    stage = layers * whole + logits
    pp = _pipeline(job, setting, by_kind.get("pp"))
    bubble = (stage + pp) * (setting.pp - 1) / setting.vpp
    n = layers * m
    return StepTime(
        matrices=3 * layer.matrices * n,
        attention=(layer.attention + _backward_attention(job, layer)) * n,
        elementwise=3 * layer.elementwise * n,
        logits=logits * m,
        recompute=again * n,
        tp=per_layer["tp"] * n,
        ulysses=per_layer["ulysses"] * n,
        ring=per_layer["ring"] * n,
        ep=per_layer["ep"] * n,
        pp=pp * m,
        bubble=bubble,
        dp=_data_parallel(job, by_kind.get("dp"), layers * whole, m),
        optimizer=_optimizer(job, setting, max(split)),
    )


def least_step_seconds(job: Job, setting: Setting) -> float:
    """A lower bound of the step's time: the layers and the pipeline's bubble, no ends, no dp.

    A billionth less, for the rounding of the sums in another order.
    """
    split = stage_layers(job.model, setting)
    assert split is not None
    layer, m = _forward(job, setting), setting.num_micro_batches(job.global_batch_size)
    passes = 3 * (layer.matrices + layer.elementwise) + layer.attention
    passes += _backward_attention(job, layer) + _recomputed(job, setting, layer)
    passes += sum(_exposed(job, setting).values())
    return split[1] * passes * (m + (setting.pp - 1) / setting.vpp) * (1 - 1e-9)


def matrix_seconds(job: Job, flops: float, *, count: float = 1.0) -> float:
    """Time of `count` equal matrix products of `flops` FLOPs in total."""
    gpu, fp8 = job.gpu, job.precision == "fp8"
    peak = gpu.peak_flops_fp8 if fp8 else gpu.peak_flops
    if job.precision == "fp32":
        peak /= 8  # without tensor cores; exact only in order of magnitude
    efficiency = gpu.matrix_efficiency * (FP8_EFFICIENCY if fp8 else 1.0)
    if not flops:
        return 0.0
    return flops / (peak * efficiency) + count * HALF_FLOPS_SECONDS / efficiency


def _forward(job: Job, setting: Setting) -> _Layer:
    s = setting
    return _forward_layer(job, s.tp, s.ulysses, s.ring, s.ep, s.micro_batch)


@lru_cache(maxsize=1 << 14)
def _forward_layer(job: Job, tp: int, ulysses: int, ring: int, ep: int, micro_batch: int) -> _Layer:
    setting = Setting(tp=tp, ulysses=ulysses, ring=ring, ep=ep, micro_batch=micro_batch)
    model, t = job.model, tokens_per_rank(job, setting)
    moe_share = model.num_moe_layers / model.num_layers
    kept = layer_activations(job, setting)
    nbytes, mlp = kept.attention + kept.mlp, kept.mlp
    if moe_share:
        experts = layer_activations(job, setting, moe=True)
        nbytes += (experts.mlp - mlp) * moe_share
    q = t * model.num_attention_heads / tp * model.head_dim
    # Copies around the exchange: 8 of the local Q in both passes, each read and written. Ring
    # rescales its fp32 output, and adds to dq, dk and dv, once a step: 10 bytes an element.
    traffic = 2 * nbytes + (16 / 3 * q * job.element_size if setting.ulysses > 1 else 0.0)
    traffic += (setting.ring - 1) * 10 * q
    attention = model.attention_flops_per_token(job.seq_length) / model.num_layers * t / tp
    layout = head_layout(model, tp, setting.ulysses)
    attention *= 1 + getattr(layout, "imbalance", 0.0)
    if job.attention == "flash":
        block = job.seq_length / (2 * setting.ring if setting.ring > 1 else 1)  # zigzag halves
        reached = job.gpu.flash_efficiency * block / (block + SHORT_SEQUENCE)
        seconds = attention / (job.gpu.peak_flops * reached)
    else:  # the upper triangle is computed too; scores are written and read
        reached = job.gpu.matrix_efficiency * UNFUSED_EFFICIENCY
        seconds = 2 * attention / (job.gpu.peak_flops * reached)
        scores = t * job.seq_length * model.num_attention_heads / tp
        seconds += 2 * scores * 5 / (job.gpu.memory_bandwidth * MEMORY_EFFICIENCY)
    return _Layer(
        matrices=_matrices(job, setting, t, moe_share),
        attention=seconds,
        elementwise=traffic / (job.gpu.memory_bandwidth * MEMORY_EFFICIENCY),
    )


def _matrices(job: Job, setting: Setting, t: float, moe_share: float) -> float:
    """QKV, projection, and the two products of the MLP or of the experts."""
    model, tp = job.model, setting.tp
    attention = 2 * t * model.sharded_attention_parameters / tp
    if model.mla:
        down = model.hidden_size * (model.mla.kv_lora_rank + model.mla.rope_head_dim)
        attention += 2 * t * (down + model.hidden_size * (model.mla.q_lora_rank or 0))
    dense = 2 * t * model.mlp_parameters(model.ffn_hidden_size) / tp
    seconds = matrix_seconds(job, attention, count=2)
    seconds += (1 - moe_share) * matrix_seconds(job, dense, count=2)
    if model.moe and moe_share:
        routed = 2 * t * model.moe.top_k * model.mlp_parameters(model.moe.ffn_hidden_size) / tp
        shared = 2 * t * model.mlp_parameters(model.moe.shared_ffn_hidden_size) / tp
        local = model.moe.num_experts / setting.ep
        # Grouped products: a tenth of a launch for each expert.
        seconds += moe_share * matrix_seconds(job, routed, count=2 + 0.2 * local)
        seconds += moe_share * matrix_seconds(job, shared, count=2)
    return seconds


def _backward_attention(job: Job, layer: _Layer) -> float:
    # Flash attention computes QK^T once more: 5 products instead of 4.
    return layer.attention * (2.5 if job.attention == "flash" else 2.0)


def _recomputed(job: Job, setting: Setting, layer: _Layer) -> float:
    """Compute that is done a second time, per layer; its communication is in the flows."""
    if setting.recompute == "full":
        return layer.matrices + layer.attention + layer.elementwise
    return layer.attention if setting.recompute == "selective" else 0.0


def _exposed(job: Job, setting: Setting) -> dict[str, float]:
    """Exposed seconds per layer and micro-batch of each kind, both passes."""
    s = setting
    return _exposed_of_layer(
        job, s.tp, s.ulysses, s.ring, s.ep, s.micro_batch, s.recompute, s.world_size
    )


@lru_cache(maxsize=1 << 14)
def _exposed_of_layer(
    job: Job, tp: int, ulysses: int, ring: int, ep: int, micro_batch: int, recompute: str,
    world_size: int,
) -> dict[str, float]:  # fmt: skip
    setting = Setting(
        tp=tp, ulysses=ulysses, ring=ring, ep=ep, micro_batch=micro_batch, recompute=recompute,
        dp=world_size // (tp * ulysses * ring),
    )  # fmt: skip
    by_kind = {flow.kind: flow for flow in layer_flows(job, setting)}
    forward, backward = _communication(job, by_kind, _forward(job, setting))
    return {kind: forward[kind] + backward[kind] for kind in forward}


def _communication(
    job: Job, by_kind: dict[str, Flow], layer: _Layer
) -> tuple[dict[str, float], dict[str, float]]:
    """Exposed seconds per layer of each kind, forward and backward."""
    forward, backward = {}, {}
    for kind in ("tp", "ulysses", "ring", "ep"):
        flow = by_kind.get(kind)
        if flow is None:
            forward[kind] = backward[kind] = 0.0
            continue
        half = flow.messages / 2
        forward[kind] = flow_seconds(job, flow, flow.forward, half)
        backward[kind] = flow_seconds(job, flow, flow.backward - flow.hidden, half)
    if job.tp_overlap:
        forward["tp"] *= OVERLAP_LEFT
        backward["tp"] *= OVERLAP_LEFT
    # Ring passes the next keys and values while it attends to these.
    forward["ring"] = max(forward["ring"] - layer.attention, 0.0)
    backward["ring"] = max(backward["ring"] - _backward_attention(job, layer), 0.0)
    return forward, backward


def _pipeline(job: Job, setting: Setting, flow: Flow | None) -> float:
    """Exposed sends per micro-batch."""
    if flow is None:
        return 0.0
    once = flow_seconds(job, flow, flow.forward + flow.backward, flow.messages)
    return once * setting.vpp


def _data_parallel(job: Job, flow: Flow | None, one_pass: float, micro_batches: int) -> float:
    """What of the reduction and gathering does not fit behind the passes beside it."""
    if flow is None:
        return 0.0
    seconds = flow_seconds(job, flow, flow.forward + flow.backward, flow.messages)
    beside = one_pass * (micro_batches if job.zero_stage == 3 else 1)
    return max(seconds - beside, 0.02 * seconds)


def _logits(job: Job, setting: Setting) -> float:
    """Output layer and loss, both passes, per micro-batch."""
    t, share = tokens_per_rank(job, setting), job.model.vocab_size / setting.tp
    flops = 2 * t * job.model.hidden_size * share
    again = 1 if job.tiled_logits else 0
    traffic = 4 * t * share * (job.element_size + 4)
    product = flops / (job.gpu.peak_flops * job.gpu.matrix_efficiency)
    return (3 + again) * product + traffic / (job.gpu.memory_bandwidth * MEMORY_EFFICIENCY)


def _optimizer(job: Job, setting: Setting, layers: int) -> float:
    plain, experts = stage_parameters(job.model, setting, layers, tables=1)
    share = setting.dp * setting.cp if job.zero_stage else 1
    traffic = OPTIMIZER_TRAFFIC * (plain / share + experts / min(share, setting.dp))
    bandwidth = 50e9 if job.offload_optimizer else job.gpu.memory_bandwidth * MEMORY_EFFICIENCY
    return traffic / bandwidth


def mfu(job: Job, seconds: float) -> float:
    """Model FLOPs (causal, without recomputation) over the bf16 or fp8 peak."""
    peak = job.gpu.peak_flops_fp8 if job.precision == "fp8" else job.gpu.peak_flops
    return model_flops(job.model, job) / (seconds * peak * job.num_gpus) if seconds else inf


def model_flops(model: ModelShape, job: Job) -> float:
    """FLOPs of one step by Megatron's convention."""
    return model.flops_per_token(job.seq_length) * job.tokens_per_step
