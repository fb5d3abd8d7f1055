"""What a model and the ranks that share it must fit to: each rule alone, so that all can be told.

Pure arithmetic, no torch. A rule takes the config and raises ParallelConfigError or UserError.
"""

from __future__ import annotations

import math
import sys
from importlib import metadata

from ulysses_mc.parallel_state import ParallelConfigError
from ulysses_mc.planning.megatron_fields import core_folder, transformer_fields

from .config import Config
from .errors import UserError
from .misread import unknown_key


def no_ring(config: Config) -> None:
    parallel = config.parallel
    ring, ulysses = parallel.ring_parallel_size, parallel.ulysses_parallel_size
    if ring > 1:
        raise ParallelConfigError(
            f"parallel.ring_parallel_size {ring} with ulysses_parallel_size {ulysses}.",
            rule="ring attention is not there yet: layers refuse ring_parallel_size > 1.",
            nearest=f"ring_parallel_size 1 with ulysses_parallel_size {ring * ulysses}",
        )


def query_heads(config: Config) -> None:
    tensor = config.parallel.tensor_model_parallel_size
    heads = config.model.num_attention_heads
    _divides(heads, tensor, "model.num_attention_heads", "tensor_model_parallel_size")


def heads_in_groups(config: Config) -> None:
    heads, groups = config.model.num_attention_heads, config.model.num_query_groups
    _divides(heads, groups or heads, "model.num_attention_heads", "model.num_query_groups")


def key_value_heads(config: Config) -> None:
    tensor, groups = config.parallel.tensor_model_parallel_size, config.model.num_query_groups
    if groups and groups % tensor and tensor % groups:
        raise ParallelConfigError(
            f"{groups} key/value heads over tensor_model_parallel_size={tensor}.",
            rule="num_query_groups divides, or is a multiple of, tensor_model_parallel_size.",
            nearest=f"num_query_groups {tensor}",
        )


def ffn_hidden_size(config: Config) -> int:
    model = config.model
    usual = model.hidden_size * (8 / 3 if model.swiglu else 4)
    return model.ffn_hidden_size or math.ceil(usual / 64) * 64


def feed_forward(config: Config) -> None:
    tensor = config.parallel.tensor_model_parallel_size
    _divides(ffn_hidden_size(config), tensor, "model.ffn_hidden_size", "tensor_model_parallel_size")


def no_multi_token_prediction(config: Config) -> None:
    if config.model.transformer.get("mtp_num_layers"):
        raise UserError(
            "model.transformer.mtp_num_layers: this script builds no blocks for multi-token "
            "prediction (with_ulysses(spec) wires those of a model of your own)"
        )


# What of a mixture of experts looks at all tokens of a batch, and so at padding too.
_OF_ALL_TOKENS = (
    "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias",
    "moe_expert_capacity_factor", "moe_input_jitter_eps",
)  # fmt: skip


def experts_without_padding(config: Config, padded: int, multiple: int) -> None:
    """A loss mask hides padding from the loss, not from a router's statistics."""
    model = config.model
    given = [name for name in _OF_ALL_TOKENS if model.transformer.get(name)]
    if model.transformer.get("num_moe_experts") and given and padded != model.seq_length:
        raise UserError(
            f"model.transformer with {', '.join(given)}, and samples of {model.seq_length} tokens "
            f"padded to {padded}: the router would count the padding. model.seq_length "
            f"{max(padded - multiple, multiple)} or {padded} needs none"
        )


def messages(config: Config) -> None:
    """model.transformer may undo what keeps the messages of two interleaved stages apart."""
    parallel, transformer = config.parallel, config.model.transformer
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    apart = transformer.get("overlap_p2p_comm", True) and not transformer.get("batch_p2p_comm")
    if parallel.pipeline_model_parallel_size == 2 and chunks > 1 and not apart:
        raise ParallelConfigError(
            f"{chunks} model chunks on each of 2 pipeline stages, with "
            "batch_p2p_comm or without overlap_p2p_comm in model.transformer.",
            rule="without it, messages of one batch between the same two ranks are mistaken for "
            "one another",
            nearest="model.transformer without overlap_p2p_comm and batch_p2p_comm.",
        )


def documents(config: Config) -> None:
    model = config.model
    stock = (model.transformer_impl, model.local_attention) == ("local", "spec")
    if config.data.isolate_documents and stock:
        raise UserError(
            "data.isolate_documents with Megatron's DotProductAttention, which cannot keep "
            "documents apart: set model.local_attention auto or sdpa"
        )


# Megatron's, in model.transformer: embedding and loss count as a layer each. Both or neither.
_ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def layers(config: Config) -> None:
    model, parallel = config.model, config.parallel
    if model.kind != "gpt":
        return
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    ends = 2 if all(model.transformer.get(name) for name in _ENDS) else 0
    what = "model.num_layers" + " + embedding + loss" * (ends > 0)
    stages = parallel.pipeline_model_parallel_size * chunks
    _divides(model.num_layers + ends, stages, what, "pipeline stages x chunks")


def hybrid_pattern(config: Config) -> None:
    model = config.model
    if model.kind != "hybrid":
        return
    if not model.hybrid_layer_pattern:
        raise UserError("model.kind hybrid needs model.hybrid_layer_pattern, for example '*-*-'")
    letters = set(model.hybrid_layer_pattern)
    if model.transformer_impl == "local" and letters - set("*-E|"):
        raise UserError(
            f"hybrid layers {''.join(sorted(letters - set('*-E|')))!r} need model.transformer_impl "
            "transformer_engine; without it the pattern holds * (attention), - (MLP), E (experts)"
        )
    shards = config.parallel.context_parallel_size
    if "M" in letters and shards > 1:
        raise UserError(
            f"Mamba layers (M) with ulysses_parallel_size {shards}: they need the whole sequence; "
            "set ulysses_parallel_size 1, or a pattern of * and -"
        )


_HYBRID = "models/hybrid/hybrid_model.py"


def hybrid_is_there(config: Config) -> None:
    """HybridModel came with megatron-core 0.19; looked up as a file, for importing takes seconds.

    Where Megatron is not installed nothing is said: a config can be checked on any machine.
    """
    core = core_folder()
    if config.model.kind == "hybrid" and core and not (core / _HYBRID).is_file():
        raise UserError(
            "model.kind hybrid needs megatron-core >= 0.19, which needs Python >= 3.12; here is "
            f"megatron-core {_version()} on Python {sys.version.split()[0]}"
        )


def transformer_keys(config: Config) -> None:
    given, classes = config.model.transformer, transformer_fields()
    names = ["ModelParallelConfig", "TransformerConfig"]
    names += ["MLATransformerConfig"] if given.get("multi_latent_attention") else []
    known = sorted(set[str]().union(*(classes.get(name, ()) for name in names)))
    wrong = [unknown_key(n, known, "field of model.transformer") for n in given if n not in known]
    if known and wrong:
        raise UserError("\n".join(wrong))


RULES = (
    no_ring,
    query_heads,
    heads_in_groups,
    key_value_heads,
    feed_forward,
    no_multi_token_prediction,
    messages,
    documents,
    layers,
    hybrid_pattern,
    hybrid_is_there,
    transformer_keys,
)


def _divides(number: int, divisor: int, what: str, by: str) -> None:
    if number < 1 or number % divisor:
        near = [d for d in range(1, number + 1) if number % d == 0] or [1]
        best = sorted(near, key=lambda d: abs(d - divisor))[:2]
        raise ParallelConfigError(
            f"{what} {number} over {by} {divisor}.",
            f"{number} / {divisor} = {number / divisor:.3g}.",
            f"{by} divides {what}.",
            f"{by} {' or '.join(map(str, sorted(best)))} with {what} {number}; or {what} "
            f"{max(1, round(number / divisor)) * divisor} with {by} {divisor}",
        )


def _version() -> str:
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return "without a version"
