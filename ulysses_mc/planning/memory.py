"""Memory of the fullest GPU, part by part, in bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from .activations import LayerActivations, layer_activations, tokens_per_rank
from .hardware import GIB
from .job import Job, Setting
from .model import ModelShape

# What the CUDA context, NCCL's channels and cuBLAS take, and the allocator's fragmentation.
FIXED_MARGIN = 1.5 * GIB
FRAGMENTATION = 0.04
TILE_TOKENS = 2048  # of the tiled logits
MLP_TILES = 8  # at least; at long context a tile has as many tokens as the hidden size


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest GPU."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    exchange_buffers: float
    working: float
    margin: float

    @property
    def total(self) -> float:
        known = self.states + self.activations + self.logits
        return known + self.exchange_buffers + self.working + self.margin

    @property
    def states(self) -> float:
        return self.parameters + self.gradients + self.optimizer

    def parts(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def stage_layers(model: ModelShape, setting: Setting) -> tuple[int, int] | None:
    """Layers of the first and of a middle pipeline stage; None if they do not divide evenly.

    Where L does not divide, the embedding and the loss count as a layer each, as with
    Megatron's --account-for-embedding-in-pipeline-split and --account-for-loss-...
    """
    stages = setting.pp * setting.vpp
    if model.num_layers % stages == 0:
        return model.num_layers // setting.pp, model.num_layers // setting.pp
    if setting.pp > 1 and (model.num_layers + 2) % stages == 0:
        each = (model.num_layers + 2) // setting.pp
        return each - 1, each
    return None


def layer_parameters(model: ModelShape, setting: Setting) -> tuple[float, float, float]:
    """Parameters per GPU: of a dense layer, of a MoE layer without its experts, of its experts."""
    return _layer_parameters(model, setting.tp, setting.ep)


@lru_cache(maxsize=4096)
def _layer_parameters(model: ModelShape, tp: int, ep: int) -> tuple[float, float, float]:
    attention = model.sharded_attention_parameters - model.kv_parameters
    kv = model.kv_parameters / model.num_query_groups * max(model.num_query_groups / tp, 1)
    common = (attention + model.bias_parameters) / tp + kv + model.replicated_attention_parameters
    dense = common + model.mlp_parameters(model.ffn_hidden_size) / tp
    if not model.moe:
        return dense, 0.0, 0.0
    shared = model.mlp_parameters(model.moe.shared_ffn_hidden_size) / tp
    experts = model.expert_parameters / (ep * (1 if ep > 1 else tp))
    return dense, common + shared + model.router_parameters, experts


def stage_parameters(
    model: ModelShape, setting: Setting, layers: int, *, tables: int
) -> tuple[float, float]:
    """Parameters of one stage's GPU: those replicated over dp x cp, and the experts' own."""
    return _stage_parameters(model, setting.tp, setting.ep, layers, tables)


@lru_cache(maxsize=1 << 14)
def _stage_parameters(
    model: ModelShape, tp: int, ep: int, layers: int, tables: int
) -> tuple[float, float]:
    dense, moe, experts = _layer_parameters(model, tp, ep)
    share = layers / model.num_layers
    num_moe = model.num_moe_layers * share
    outside = tables * model.embedding_parameters / tp
    outside += model.hidden_size * (2 if model.layer_norm else 1)  # the norm after the last layer
    outside += model.learned_positions * model.hidden_size if tables else 0
    return (layers - num_moe) * dense + num_moe * moe + outside, num_moe * experts


def states(job: Job, setting: Setting, plain: float, experts: float) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer of one GPU."""
    return _states(job, setting.tp, setting.dp * setting.cp, setting.ep, plain, experts)


@lru_cache(maxsize=1 << 14)
def _states(
    job: Job, tp: int, group: int, ep: int, plain: float, experts: float
) -> tuple[float, float, float]:
    """`group`: ranks that share the parameters outside the experts, dp x cp."""
    expert_group = max(tp * group // (ep * (1 if ep > 1 else tp)), 1)
    counts = ((plain, group), (experts, expert_group))
    result = []
    for level, nbytes in zip((3, 2, 1), job.state_bytes, strict=True):
        sharded = job.zero_stage >= level
        result.append(sum(nbytes * n / (g if sharded else 1) for n, g in counts))
    if job.offload_parameters:
        result[0] = 0.0
    if job.offload_optimizer:
        result[2] = 0.0
        if job.zero_stage >= 2:  # gradients go to the host bucket by bucket
            result[1] = 0.0
    return result[0], result[1], result[2]


def in_flight(setting: Setting, micro_batches: int) -> float:
    """Stages' worth of activations that the first pipeline stage holds.

    1F1B holds p micro-batches of L/p layers; interleaved with v chunks, L (1 + (p-1)/(p v))
    layers' worth (arXiv 2205.05198, section 4.2.3).
    """
    p, v = setting.pp, setting.vpp
    held = p * (1 + (p - 1) / (p * v)) if v > 1 else p
    return min(held, micro_batches)


def activation_bytes(
    job: Job, setting: Setting, dense: LayerActivations, moe: LayerActivations | None, layers: int
) -> float:
    """Bytes that `layers` layers keep for one micro-batch."""
    if setting.recompute == "full":
        return 0.0 if job.offload_checkpoints else layers * dense.layer_input
    num_moe = job.model.num_moe_layers * layers / job.model.num_layers if moe else 0.0
    return (layers - num_moe) * dense.kept + num_moe * (moe.kept if moe else 0.0)


def memory(job: Job, setting: Setting) -> Memory:
    """The fullest stage's memory. `stage_layers` must have accepted the setting."""
    split = stage_layers(job.model, setting)
    assert split is not None
    first, middle = split
    last = first  # both ends give up a layer when the embedding and the loss count as one
    dense = layer_activations(job, setting)
    moe = layer_activations(job, setting, moe=True) if job.model.moe else None
    m = setting.num_micro_batches(job.global_batch_size)
    untied = not job.model.tied_embeddings
    if setting.pp == 1:
        return _stage(job, setting, dense, moe, first, 1, 1 + untied, with_logits=True)
    candidates = [
        _stage(job, setting, dense, moe, first, in_flight(setting, m), 1, with_logits=False),
        _stage(job, setting, dense, moe, last, 1, 1, with_logits=True),
    ]
    if middle != first:
        held = max(in_flight(setting, m) - 1, 1)
        candidates.append(_stage(job, setting, dense, moe, middle, held, 0, with_logits=False))
    return max(candidates, key=lambda memory: memory.total)


def _stage(
    job: Job, setting: Setting, dense: LayerActivations, moe: LayerActivations | None,
    layers: int, held: float, tables: int, *, with_logits: bool,
) -> Memory:  # fmt: skip
    plain, experts = stage_parameters(job.model, setting, layers, tables=tables)
    parameters, gradients, optimizer = states(job, setting, plain, experts)
    widest = moe if moe and moe.kept > dense.kept else dense
    activations = held * activation_bytes(job, setting, dense, moe, layers)
    logits = logits_bytes(job, setting) if with_logits else 0.0
    working = _working(job, setting, widest)
    if job.zero_stage == 3 or job.offload_parameters:
        # The layer in use and the one fetched ahead, gathered.
        working += 2 * job.element_size * (plain + experts) / max(layers, 1)
    if with_logits:  # the logits are gone before the first layer's gradients come
        working = max(working - logits, 0.0)
    known = parameters + gradients + optimizer + activations + logits + working
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=logits,
        exchange_buffers=widest.exchange,
        working=working,
        margin=FIXED_MARGIN + FRAGMENTATION * (known + widest.exchange),
    )


def _working(job: Job, setting: Setting, layer: LayerActivations) -> float:
    """What lives only during one layer's backward pass; with full recompute, the layer too."""
    tiles = max(MLP_TILES, tokens_per_rank(job, setting) / job.model.hidden_size)
    shrink = tiles if job.tiled_mlp else 1.0
    if setting.recompute != "full":
        return max(layer.attention_work, layer.mlp_work / shrink)
    in_attention = layer.attention + layer.softmax + layer.attention_work
    in_mlp = layer.attention + (layer.mlp + layer.mlp_work) / shrink
    return max(in_attention, in_mlp)


def logits_bytes(job: Job, setting: Setting) -> float:
    """Logits in the compute type, their softmax in fp32 (megatron.core's cross entropy)."""
    tokens = tokens_per_rank(job, setting)
    if job.tiled_logits:
        tokens = min(tokens, TILE_TOKENS)
    return tokens * job.model.vocab_size / setting.tp * (job.element_size + 4)
