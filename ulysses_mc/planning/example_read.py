"""A run from the YAML config of examples/pretrain_gpt.py."""

from __future__ import annotations

from difflib import get_close_matches
from math import ceil
from pathlib import Path
from typing import Any

from .fields import Fields
from .hugging_face import model_problems
from .model import MLAShape, ModelShape, MoEShape
from .problems import Problem, RequestError
from .run import Run

# Sections and the keys of them that are read here; a test holds them against the example's own.
KEYS = {
    "parallel": (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "ulysses_parallel_size",
        "ring_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
        "data_parallel_size", "virtual_pipeline_model_parallel_size", "order",
        "distributed_timeout_minutes",
    ),
    "model": (
        "kind", "num_layers", "hidden_size", "num_attention_heads", "num_query_groups",
        "ffn_hidden_size", "seq_length", "vocab_size", "make_vocab_size_divisible_by",
        "normalization", "swiglu", "position_embedding_type", "rotary_base",
        "share_embeddings_and_output_weights", "hybrid_layer_pattern", "transformer_impl",
        "local_attention", "recompute", "attention_dropout", "hidden_dropout", "transformer",
    ),
    "batch": ("micro_batch_size", "global_batch_size"),
    "optimizer": (
        "lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "lr_decay_iters", "weight_decay",
        "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "use_distributed_optimizer",
        "overlap_grad_reduce", "overlap_param_gather",
    ),
    "training": ("train_iters", "seed", "precision", "self_check"),
}  # fmt: skip
OTHER_KEYS = ("output", "device", "data", "evaluation", "checkpoint", "logging")
_BYTE_VOCABULARY = 384  # what the example's own byte tokenizer comes to, with its padding


def read_yaml(path: str | Path) -> Run:
    """The run that a config of the example describes.

    Raises:
        RequestError: PyYAML is missing, or the file is not there or no mapping. What is wrong
            inside is in the run's `problems`.
    """
    try:
        import yaml
    except ImportError:
        problem = Problem(
            "PyYAML is not installed", "reading YAML needs it", "pip install 'ulysses-mc[plan]'"
        )
        raise RequestError([problem]) from None
    rule = "a YAML mapping, as in examples/configs/"
    try:
        data = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        message = " ".join(str(error).split())
        raise RequestError([Problem(f"{path}: {message}", rule)]) from None
    if not isinstance(data, dict):
        raise RequestError([Problem(f"{path} holds {type(data).__name__}", rule)])
    return run_from_config(data, str(path))


def run_from_config(data: dict[str, Any], source: str) -> Run:
    """The run of a config that is already a dict."""
    problems = _unknown(data, source)
    sections = {}
    for name in KEYS:
        section = data.get(name)
        if section is not None and not isinstance(section, dict):
            text = f"{source}: {name} is {section!r}"
            problems.append(Problem(text, "a section with keys of its own"))
            section = None
        sections[name] = Fields(section or {}, f"{source}: {name}")
    transformer = sections["model"].values.get("transformer") or {}
    if not isinstance(transformer, dict):
        text = f"{source}: model.transformer is {transformer!r}"
        problems.append(Problem(text, "fields of Megatron's TransformerConfig"))
        transformer = {}
    extra = Fields(transformer, f"{source}: model.transformer")
    model = _model(sections["model"], extra, sections["parallel"])
    run = _run(sections, extra, model, source)
    found = [*problems, *(p for f in (*sections.values(), extra) for p in f.problems)]
    derived = model.mla is None and "kv_channels" not in transformer
    found += model_problems(model, source, found, derived=derived)
    return Run(**{**run.__dict__, "problems": tuple(found)})


def _unknown(data: dict[str, Any], source: str) -> list[Problem]:
    problems = []
    top = (*KEYS, *OTHER_KEYS)
    for key, value in data.items():
        if key not in top:
            problems.append(_unknown_key(source, str(key), top))
        elif key in KEYS and isinstance(value, dict):
            names = KEYS[key]
            strangers = [str(name) for name in value if name not in names]
            problems += [_unknown_key(source, f"{key}.{n}", names) for n in strangers]
    return problems


def _unknown_key(source: str, key: str, known: tuple[str, ...]) -> Problem:
    near = get_close_matches(key.rpartition(".")[2], known, n=1, cutoff=0.5)
    return Problem(f"{source}: unknown key {key!r}", "a known key", near[0] if near else "")


def _model(model: Fields, extra: Fields, parallel: Fields) -> ModelShape:
    hidden = model.whole("hidden_size", default=128)
    heads = model.whole("num_attention_heads", default=8)
    swiglu = model.flag("swiglu", default=True)
    usual = ceil(hidden * (8 / 3 if swiglu else 4) / 64) * 64
    ffn = model.whole("ffn_hidden_size", default=usual)
    unit = model.whole("make_vocab_size_divisible_by", default=128)
    unit *= parallel.whole("tensor_model_parallel_size", default=1)
    vocabulary = model.whole("vocab_size", default=_BYTE_VOCABULARY)
    mla = _mla(extra)
    layers = model.whole("num_layers", default=4)
    norm = model.text("normalization", "RMSNorm", ("RMSNorm", "LayerNorm"))
    learned = model.text("position_embedding_type", "rope") == "learned_absolute"
    head_dim = extra.whole("kv_channels", default=max(hidden // heads, 1))
    if mla:
        head_dim = extra.whole("qk_head_dim", default=128) + mla.rope_head_dim
    return ModelShape(
        name="the example's model",
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads if mla else model.whole("num_query_groups", default=heads),
        head_dim=head_dim,
        value_head_dim=extra.whole("v_head_dim", default=128) if mla else 0,
        ffn_hidden_size=ffn,
        vocab_size=-(-vocabulary // unit) * unit,
        gated_mlp=swiglu,
        layer_norm=norm == "LayerNorm",
        linear_bias=extra.flag("add_bias_linear"),
        qkv_bias=extra.flag("add_qkv_bias"),
        qk_norm=extra.flag("qk_layernorm"),
        tied_embeddings=model.flag("share_embeddings_and_output_weights"),
        hidden_dropout=model.number("hidden_dropout", default=0.0) > 0,
        learned_positions=model.whole("seq_length", default=256) if learned else 0,
        rotary_base=model.number("rotary_base", default=10000.0),
        moe=_moe(extra, ffn),
        mla=mla,
    )


def _mla(extra: Fields) -> MLAShape | None:
    if not extra.flag("multi_latent_attention"):
        return None
    return MLAShape(
        q_lora_rank=extra.whole("q_lora_rank") if extra.values.get("q_lora_rank") else None,
        kv_lora_rank=extra.whole("kv_lora_rank", default=512),
        rope_head_dim=extra.whole("qk_pos_emb_head_dim", default=64),
    )


def _moe(extra: Fields, ffn: int) -> MoEShape | None:
    if not extra.values.get("num_moe_experts"):
        return None
    frequency = extra.values.get("moe_layer_freq")
    dense = frequency.count(0) if isinstance(frequency, list) else 0
    shared = "moe_shared_expert_intermediate_size"
    return MoEShape(
        num_experts=extra.whole("num_moe_experts"),
        top_k=extra.whole("moe_router_topk", default=2),
        ffn_hidden_size=extra.whole("moe_ffn_hidden_size", default=ffn),
        shared_ffn_hidden_size=extra.whole(shared, default=0, minimum=0),
        num_dense_layers=dense,
    )


def _run(sections: dict[str, Fields], extra: Fields, model: ModelShape, source: str) -> Run:
    parallel, batch = sections["parallel"], sections["batch"]
    fields = sections["model"]
    given = parallel.values
    precision = sections["training"].text("precision", "fp32", ("fp32", "bf16"))
    impl = fields.text("transformer_impl", "local", ("local", "transformer_engine"))
    local = fields.text("local_attention", "sdpa", ("spec", "sdpa"))
    sharded = sections["optimizer"].flag("use_distributed_optimizer", default=True)

    def optional(name: str) -> int | None:
        return parallel.whole(name) if given.get(name) is not None else None

    return Run(
        source=source,
        model=model,
        seq_length=fields.whole("seq_length", default=256),
        micro_batch_size=batch.whole("micro_batch_size", default=1),
        global_batch_size=batch.whole("global_batch_size", default=16),
        tp=parallel.whole("tensor_model_parallel_size", default=1),
        ulysses=parallel.whole("ulysses_parallel_size", default=1),
        ring=parallel.whole("ring_parallel_size", default=1),
        pp=parallel.whole("pipeline_model_parallel_size", default=1),
        vpp=parallel.whole("virtual_pipeline_model_parallel_size", default=1),
        ep=parallel.whole("expert_model_parallel_size", default=1),
        order=parallel.text("order", "tp-ulysses-ring-ep-dp-pp"),
        recompute=fields.text("recompute", "none", ("none", "selective", "full")),
        precision=precision,
        zero_stage=1 if sharded else 0,
        tp_sequence_sharding=extra.flag("sequence_parallel"),
        ends_count=extra.flag("account_for_embedding_in_pipeline_split")
        and extra.flag("account_for_loss_in_pipeline_split"),
        attention="unfused" if impl == "local" and local == "spec" else "flash",
        kernels="plain" if impl == "local" else "fused",
        dp=optional("data_parallel_size"),
        etp=optional("expert_tensor_parallel_size"),
    )
