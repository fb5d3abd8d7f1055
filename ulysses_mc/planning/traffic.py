"""Bytes that one GPU sends per training step, by kind of parallelism and by link."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from .activations import tokens_per_rank
from .job import Job, Setting, head_layout
from .memory import stage_layers, stage_parameters
from .model import ModelShape

KINDS = ("tp", "ulysses", "ring", "ep", "pp", "dp")


@dataclass(frozen=True)
class Flow:
    """What one kind of parallelism sends.

    Args:
        forward, backward: bytes sent per layer and micro-batch (pp: per boundary; dp: per step).
        messages: calls per layer and micro-batch, both passes (dp: per step).
        group: ranks that take part; `per_node`: those of them on one node.
        pattern: 'ring' (all-gather and the like), 'all_to_all' or 'p2p'.
        hidden: of `backward`, bytes that travel while a matrix product runs.
        ends: bytes per micro-batch for the embedding and the loss, both passes, where they are.
        once: bytes per step besides.
    """

    kind: str
    forward: float
    backward: float
    messages: float
    group: int
    per_node: int
    pattern: str
    hidden: float = 0.0
    ends: float = 0.0
    once: float = 0.0

    @property
    def spans_nodes(self) -> bool:
        return self.per_node < self.group

    @property
    def outside(self) -> float:
        """Part of the bytes that leaves the node."""
        if not self.spans_nodes:
            return 0.0
        if self.pattern == "all_to_all":
            return (self.group - self.per_node) / (self.group - 1)
        return 1.0 if self.pattern == "p2p" else 1 / self.per_node


@lru_cache(maxsize=4096)
def ulysses_elements_per_token(model: ModelShape, tp: int, ulysses: int) -> float:
    """Elements sent and received by the busiest rank, forward, per token that it holds.

    (P-1)/P x (2 n_q + 2 n_k')/T x d for an even layout: DeepSpeed-Ulysses' 4Nh/P of MHA.
    """
    if ulysses == 1:
        return 0.0
    layout = head_layout(model, tp, ulysses)
    assert not isinstance(layout, Exception), layout
    lengths = (1,) * ulysses
    sizes = {
        (len(q), len(k)): rank
        for rank, (q, k) in enumerate(zip(layout.query_heads, layout.kv_heads, strict=True))
    }
    return max(
        layout.bytes_received(
            rank, lengths, batch_size=1, head_dim=model.head_dim, element_size=1,
            value_head_dim=model.value_dim,
        )
        for rank in sizes.values()
    )  # fmt: skip


def ring_elements_per_token(model: ModelShape, tp: int, ulysses: int, ring: int) -> float:
    """Elements of K and V that a rank passes on, forward, per token that it holds.

    Inside a Ulysses group each rank holds P times the tokens and 1/P of the heads, or one copy of
    a head where there are fewer: (R-1) x 2 d x max(n_k/T, P).
    """
    from .activations import kv_heads_per_rank

    heads = kv_heads_per_rank(model, tp, ulysses)
    if model.mla:
        heads = model.num_attention_heads / tp
    return (ring - 1) * heads * (model.head_dim + model.value_dim)


def ranks_per_node(group: int, stride: int, node: int, world_size: int) -> int:
    """The fewest ranks of a group, `stride` ranks apart, that share a node.

    Where neither the group's extent nor the node divides the other, as 64 ranks over nodes of
    72, some group is cut at a node's edge: its smaller part sets the pace.
    """
    extent = group * stride
    if world_size <= node:
        return group
    part = min(extent, node) if extent % node == 0 or node % extent == 0 else gcd(extent, node)
    return max(1, min(group, part // stride))


def flows(job: Job, setting: Setting) -> list[Flow]:
    """One flow for each kind of parallelism in use."""
    return [*layer_flows(job, setting), *stage_flows(job, setting)]


def layer_flows(job: Job, setting: Setting) -> Iterator[Flow]:
    """Those inside a layer: of pp and dp, their bytes per layer depend on the product alone."""
    model, e, node = job.model, job.element_size, job.gpu.gpus_per_node
    t = tokens_per_rank(job, setting)
    tp, inside = setting.tp, setting.tp
    recomputed = 1 if setting.recompute == "full" else 0

    def local(group: int, stride: int) -> int:
        return ranks_per_node(group, stride, node, setting.world_size)

    if tp > 1:
        once = 4 * (tp - 1) / tp * t * model.hidden_size * e
        # With sharded sequences the two column-parallel inputs are gathered again for dW.
        again = once / 2 if job.tp_sequence_sharding else 0.0
        calls = (10 if job.tp_sequence_sharding else 4) + 4 * recomputed
        back = once * (1 + recomputed) + again
        ends, norms = _embedding_and_loss(job, setting), _norm_gradients(job, setting)
        yield Flow("tp", once, back, calls, tp, local(tp, 1), "ring", again, ends, norms)
    if setting.ulysses > 1:
        once = ulysses_elements_per_token(model, tp, setting.ulysses) * t * e
        extra = 1 if setting.recompute != "none" else 0  # core attention runs again
        yield Flow("ulysses", once, once * (1 + extra), 4 + 2 * extra, setting.ulysses,
                   local(setting.ulysses, inside), "all_to_all")  # fmt: skip
        inside *= setting.ulysses
    if setting.ring > 1:
        once = ring_elements_per_token(model, tp, setting.ulysses, setting.ring) * t * e
        extra = 1 if setting.recompute != "none" else 0
        # Backward passes K and V round again, and dK and dV behind them.
        yield Flow("ring", once, once * (2 + extra), (setting.ring - 1) * (3 + extra),
                   setting.ring, local(setting.ring, inside), "p2p")  # fmt: skip
        inside *= setting.ring
    if setting.ep > 1 and model.moe:
        share = model.num_moe_layers / model.num_layers  # so that it may stand per layer
        once = 2 * (setting.ep - 1) / setting.ep * t / tp * model.moe.top_k * model.hidden_size * e
        yield Flow("ep", once * share, once * share * (1 + recomputed), 4 * share, setting.ep,
                   local(setting.ep, 1), "all_to_all")  # fmt: skip


def stage_flows(job: Job, setting: Setting) -> Iterator[Flow]:
    """Those between stages and between copies of them: pp and dp."""
    t, e, tp = tokens_per_rank(job, setting), job.element_size, setting.tp

    def local(group: int, stride: int) -> int:
        return ranks_per_node(group, stride, job.gpu.gpus_per_node, setting.world_size)

    if setting.pp > 1:
        once = t * job.model.hidden_size * e / (tp if job.tp_sequence_sharding else 1)
        stride = setting.world_size // setting.pp
        # The first stage sends no gradient and the last no activation, so of two stages each
        # sends once; with chunks both do, but for one.
        back = once if setting.pp > 2 else once * (setting.vpp - 1) / setting.vpp
        yield Flow("pp", once, back, 2, setting.pp, local(setting.pp, stride), "p2p")
    if setting.dp * setting.cp > 1:
        yield _data_parallel(job, setting, local(setting.dp * setting.cp, tp))


def _embedding_and_loss(job: Job, setting: Setting) -> float:
    """Bytes that a TP rank sends per micro-batch outside the layers, both passes.

    The vocabulary is divided: partial embeddings are summed, the output layer's input is gathered
    and its gradient summed, and cross entropy reduces three numbers a token (fp32).
    """
    tp, t, e = setting.tp, tokens_per_rank(job, setting), job.element_size
    hop = (tp - 1) / tp * t * job.model.hidden_size * e
    embedding = 2 * hop
    output = (3 if job.tp_sequence_sharding else 2) * hop
    loss = output + 3 * 2 * (tp - 1) / tp * t * 4
    return embedding + loss if setting.pp == 1 else max(embedding, loss)


def _norm_gradients(job: Job, setting: Setting) -> float:
    """Bytes per step that sum the norms' gradients over tp, where each rank saw its own tokens."""
    split = stage_layers(job.model, setting)
    if not job.tp_sequence_sharding or split is None:
        return 0.0
    per_norm = job.model.hidden_size * (2 if job.model.layer_norm else 1)
    count = max(split) * job.model.replicated_attention_parameters + per_norm
    return 2 * (setting.tp - 1) / setting.tp * job.state_bytes[1] * count


def _data_parallel(job: Job, setting: Setting, per_node: int) -> Flow:
    """Gradients and, when states are sharded, parameters, over dp x cp; per step."""
    split = stage_layers(job.model, setting)
    assert split is not None
    weight, gradient, _ = job.state_bytes
    group = setting.dp * setting.cp
    tables = 1 if job.model.tied_embeddings or setting.pp > 1 else 2
    plain, experts = stage_parameters(job.model, setting, max(split), tables=tables)
    factor = (group - 1) / group
    if job.zero_stage < 3:
        # Reduce-scatter of gradients and all-gather of parameters, or an all-reduce of the first.
        gather = weight if job.zero_stage else gradient
        own_group = max(setting.tp * group // max(setting.ep, setting.tp), 1)
        count = plain * factor + experts * (own_group - 1) / own_group
        return Flow("dp", gather * count, gradient * count, 2, group, per_node, "ring")
    m = setting.num_micro_batches(job.global_batch_size)
    gathers = weight * factor * (plain + experts) * m
    again = 2 if setting.recompute == "full" else 1
    reduce = gradient * factor * (plain + experts) * m
    return Flow("dp", gathers, gathers * again + reduce, 3 * max(split) * m, group, per_node,
                "ring")  # fmt: skip


def repeats(job: Job, setting: Setting, flow: Flow) -> float:
    """How often in a step a flow's bytes are sent: layers x micro-batches, or boundaries."""
    if flow.kind == "dp":
        return 1.0
    m = setting.num_micro_batches(job.global_batch_size)
    split = stage_layers(job.model, setting)
    assert split is not None
    if flow.kind == "pp":
        return m * setting.vpp
    return max(split) * m


def bytes_per_step(job: Job, setting: Setting) -> dict[str, dict[str, float]]:
    """kind -> {'intra': bytes, 'inter': bytes} that the busiest GPU sends in one step."""
    result = {}
    for flow in flows(job, setting):
        total = (flow.forward + flow.backward) * repeats(job, setting, flow) + flow.once
        total += flow.ends * setting.num_micro_batches(job.global_batch_size)
        outside = total * flow.outside
        result[flow.kind] = {"intra": total - outside, "inter": outside}
    return result


def crossover(job: Job, setting: Setting) -> tuple[float, float]:
    """Bytes per layer and micro-batch, both passes: the sequence over Ulysses, and over ring.

    Both for all `cp` ranks of the setting. Forward 1 and backward 1 for Ulysses, 1 and 2 for
    ring. Ulysses sends less where 2 (P-1)/P (2 n_q + 2 n_k') d < 3 (P-1) 2 n_k d, that is
    2 (n_q + n_k) / (3 n_k) < P for P <= n_k; past that its keys and values are copied.
    """
    t, e = tokens_per_rank(job, setting), job.element_size
    ranks = setting.cp
    ring = 3 * ring_elements_per_token(job.model, setting.tp, 1, ranks) * t * e
    if ranks > job.model.num_attention_heads // setting.tp:
        return float("inf"), ring
    return 2 * ulysses_elements_per_token(job.model, setting.tp, ranks) * t * e, ring
