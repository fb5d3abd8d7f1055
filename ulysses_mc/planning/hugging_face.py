"""A model from its Hugging Face config.json. Needs no transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .fields import Fields
from .model import MLAShape, ModelShape, MoEShape
from .problems import Problem, RequestError, check, divides, read_text

_HEADS = ("num_attention_heads", "n_head")
_KEYS = {
    "num_hidden_layers", "n_layer", "hidden_size", "n_embd", *_HEADS, "num_key_value_heads",
    "head_dim", "intermediate_size", "n_inner", "vocab_size", "max_position_embeddings",
    "n_positions", "rope_theta", "tie_word_embeddings", "attention_bias", "model_type",
    "hidden_dropout", "resid_pdrop", "num_local_experts", "num_experts", "n_routed_experts",
    "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts",
    "shared_expert_intermediate_size", "first_k_dense_replace", "q_lora_rank", "kv_lora_rank",
    "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rms_norm_eps", "text_config",
}  # fmt: skip
# Keys of usual configs that change nothing here.
_NO_MATTER = {
    "architectures", "attention_dropout", "attn_pdrop", "embd_pdrop", "bos_token_id",
    "eos_token_id", "pad_token_id", "hidden_act", "activation_function", "initializer_range",
    "torch_dtype", "dtype", "transformers_version", "use_cache", "rope_scaling",
    "rope_parameters", "pretraining_tp", "mlp_bias", "auto_map", "layer_norm_epsilon",
    "layer_norm_eps", "use_sliding_window", "sliding_window", "max_window_layers",
    "_name_or_path", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "aux_loss_alpha", "seq_aux",
    "scoring_func", "topk_group", "topk_method", "n_group", "routed_scaling_factor",
    "moe_layer_freq", "ep_size", "num_nextn_predict_layers", "quantization_config",
    "layer_types", "task_specific_params", "summary_type", "n_ctx", "id2label", "label2id",
    "return_dict", "output_attentions", "output_hidden_states", "is_encoder_decoder",
    "chunk_size_feed_forward", "problem_type", "tokenizer_class", "vision_config",
}  # fmt: skip
_QKV_BIAS = ("qwen2", "qwen2_moe")
_QK_NORM = ("qwen3", "qwen3_moe", "olmo2")
_CLASSIC = ("gpt2", "gpt_neox", "opt", "bloom")  # LayerNorm, two matrices, biases


def read_hugging_face(path: str | Path) -> ModelShape:
    """The model that a config.json (or a folder that holds one) describes.

    Raises:
        RequestError: no such file, no JSON object, or fields that are missing or wrong: all listed.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    rule = "a Hugging Face config.json: a JSON object"
    text = read_text(file, rule)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError([Problem(f"{file}: {error}", rule)]) from None
    if not isinstance(config, dict):
        raise RequestError([Problem(f"{file} holds a {type(config).__name__}", "a JSON object")])
    inner = config.get("text_config")
    merged = {**config, **inner} if isinstance(inner, dict) else config
    name = str(config.get("_name_or_path") or config.get("model_type") or file.stem)
    return model_from_config(merged, name=name, source=file.name)


def model_from_config(config: dict[str, Any], *, name: str, source: str) -> ModelShape:
    """The model of a config that is already a dict."""
    fields = Fields(config, source)
    fields.misspelt(_KEYS)
    kind = str(config.get("model_type", "llama"))
    layers, hidden = (
        fields.whole("num_hidden_layers", "n_layer"),
        fields.whole("hidden_size", "n_embd"),
    )
    heads = fields.whole(*_HEADS)
    groups = fields.whole("num_key_value_heads", default=heads)
    classic = kind in _CLASSIC
    mla = _mla(fields)
    moe = _moe(fields, layers)
    dense = fields.whole("intermediate_size", "n_inner", default=4 * hidden if classic else None)
    nope = fields.whole("qk_nope_head_dim", default=128) if mla else 0
    positions = fields.whole("max_position_embeddings", "n_positions", default=2048)
    model = ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads if mla else groups,
        head_dim=nope + mla.rope_head_dim
        if mla
        else fields.whole("head_dim", default=max(hidden // heads, 1)),
        value_head_dim=fields.whole("v_head_dim", default=128) if mla else 0,
        ffn_hidden_size=dense,
        vocab_size=fields.whole("vocab_size"),
        gated_mlp=not classic,
        layer_norm=classic,
        linear_bias=classic,
        qkv_bias=kind in _QKV_BIAS or fields.flag("attention_bias"),
        qk_norm=kind in _QK_NORM,
        tied_embeddings=fields.flag("tie_word_embeddings", default=classic),
        hidden_dropout=fields.number("hidden_dropout", "resid_pdrop", default=0.0) > 0,
        learned_positions=positions if kind in ("gpt2", "opt") else 0,
        max_positions=positions,
        rotary_base=fields.number("rope_theta", default=10000.0, above=0.0),
        moe=moe,
        mla=mla,
    )
    derived = not mla and config.get("head_dim") is None
    check([*fields.problems, *model_problems(model, source, fields.problems, derived=derived)])
    return model


def unread_keys(path: str | Path) -> list[str]:
    """Keys of a config that are neither read nor known to change nothing."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    config = json.loads(file.read_text(encoding="utf-8"))
    return sorted(key for key in config if key not in _KEYS | _NO_MATTER)


def model_problems(
    model: ModelShape, source: str, found: list[Problem], *, derived: bool
) -> list[Problem]:
    """What does not go together in a model.

    Args:
        found: what is wrong with single values, which says nothing about those together.
        derived: the head dimension was not given: it is the hidden size over the heads.
    """
    problems = []
    heads, groups = model.num_attention_heads, model.num_query_groups
    words = ("attention_heads", "attention-heads", "n_head", "value_heads", "query_groups",
             "query-groups", "hidden_size", "hidden-size", "n_embd")  # fmt: skip
    if any(word in problem.found for problem in found for word in words):
        return []
    if derived and model.hidden_size % heads:
        problems += divides("heads", heads, f"{source}: hidden size", model.hidden_size)
    if heads % groups:
        near = [n for n in range(1, heads + 1) if heads % n == 0]
        best = sorted(sorted(near, key=lambda n: abs(n - groups))[:2])
        problems.append(
            Problem(
                f"{source}: {groups} key/value heads do not divide {heads} query heads "
                f"(remainder {heads % groups})",
                "the key/value heads divide the query heads",
                " or ".join(map(str, best)),
            )
        )
    if model.moe and model.moe.top_k > model.moe.num_experts:
        problems.append(
            Problem(
                f"{source}: top {model.moe.top_k} of {model.moe.num_experts} experts",
                "a token visits at most all experts",
                str(model.moe.num_experts),
            )
        )
    return problems


def _mla(fields: Fields) -> MLAShape | None:
    if fields.values.get("kv_lora_rank") is None:
        return None
    rank = fields.values.get("q_lora_rank")
    return MLAShape(
        q_lora_rank=None if rank is None else fields.whole("q_lora_rank"),
        kv_lora_rank=fields.whole("kv_lora_rank"),
        rope_head_dim=fields.whole("qk_rope_head_dim", default=64),
    )


def _moe(fields: Fields, layers: int) -> MoEShape | None:
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    if not any(fields.values.get(name) for name in names):
        return None
    width = fields.whole("moe_intermediate_size", "intermediate_size")
    count = fields.whole("n_shared_experts", default=0, minimum=0)
    shared = fields.whole("shared_expert_intermediate_size", default=count * width, minimum=0)
    return MoEShape(
        num_experts=fields.whole(*names),
        top_k=fields.whole("num_experts_per_tok", default=2),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=shared,
        num_dense_layers=min(fields.whole("first_k_dense_replace", default=0, minimum=0), layers),
    )
