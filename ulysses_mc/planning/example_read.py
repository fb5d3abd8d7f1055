"""A run from the YAML config of examples/pretrain_gpt.py."""

from __future__ import annotations

import json
from dataclasses import replace
from math import ceil, lcm
from pathlib import Path
from typing import Any

from .example_keys import KEYS, key_problems, keys_given_twice
from .fields import Fields
from .hugging_face import model_problems
from .megatron_fields import transformer_problems
from .model import MLAShape, ModelShape, MoEShape
from .problems import Problem, RequestError, read_text
from .rules import token_multiple
from .run import Run
from .who_runs import OURS

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
    text = read_text(path, rule)
    try:
        data = yaml.safe_load(text)
        twice = list(keys_given_twice(yaml.compose(text, yaml.SafeLoader)))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        message = " ".join(str(error).split())
        raise RequestError([Problem(f"{path}: {message}", rule)]) from None
    if not isinstance(data, dict):
        what = "nothing" if data is None else f"a {type(data).__name__}"
        raise RequestError([Problem(f"{path} holds {what}", rule)])
    if twice:
        again = [f"{path}: {key} stands there twice, the second in line {n}" for key, n in twice]
        raise RequestError([Problem(line, "each key once") for line in again])
    return run_from_config(data, str(path))


def run_from_config(data: dict[str, Any], source: str) -> Run:
    """The run of a config that is already a dict."""
    problems = key_problems(data, source)
    sections = {}
    for name in KEYS:
        section = data.get(name)
        values = section if isinstance(section, dict) else {}
        sections[name] = Fields(values, f"{source}: {name}")
    transformer = sections["model"].values.get("transformer") or {}
    if not isinstance(transformer, dict):
        text = f"{source}: model.transformer is {transformer!r}"
        problems.append(Problem(text, "fields of Megatron's TransformerConfig"))
        transformer = {}
    extra = Fields(transformer, f"{source}: model.transformer")
    extra.problems += transformer_problems(transformer, source)
    vocabulary, note = _vocabulary(sections["model"], sections["data"])
    model = _model(sections["model"], extra, sections["parallel"], vocabulary)
    run = _run(sections, extra, model, source)
    found = [*problems, *(p for f in (*sections.values(), extra) for p in f.problems)]
    derived = model.mla is None and "kv_channels" not in transformer
    found += model_problems(model, source, found, derived=derived)
    padded = _padded(run)
    return replace(padded, problems=tuple(found), notes=(*padded.notes, *note))


def _padded(run: Run) -> Run:
    """The example pads samples to what the token order needs, and leaves the padding out."""
    try:
        multiple = token_multiple(run.job(), run.setting())
    except (RequestError, ZeroDivisionError):  # sizes that are told elsewhere
        return run
    padded = -(-run.seq_length // multiple) * multiple
    if padded == run.seq_length:
        return run
    note = (
        f"samples of {run.seq_length} tokens are padded to {padded}, a multiple of {multiple}; "
        "the loss leaves the padding out"
    )
    return replace(run, seq_length=padded, notes=(*run.notes, note))


def _vocabulary(model: Fields, data: Fields) -> tuple[int, tuple[str, ...]]:
    """The vocabulary as the example finds it: the config's own, else that of the data's data.json.

    Returns:
        Its size, and a note where it had to be assumed.
    """
    if model.values.get("vocab_size") is not None:
        return model.whole("vocab_size", default=_BYTE_VOCABULARY), ()
    path = data.values.get("path")
    names = [word for word in path if isinstance(word, str)] if isinstance(path, list) else []
    prefix = names[0] if names else "runs/data/python_stdlib/text"
    file = Path(str(data.values.get("description") or Path(prefix).parent / "data.json"))
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["vocab_size"]), ()
    except (OSError, ValueError, KeyError, TypeError):
        note = (
            f"no model.vocab_size and no {file}: a vocabulary of {_BYTE_VOCABULARY} is assumed, "
            "so embedding and logits may be far larger"
        )
        return _BYTE_VOCABULARY, (note,)


def _model(model: Fields, extra: Fields, parallel: Fields, vocabulary: int) -> ModelShape:
    hidden = model.whole("hidden_size", default=128)
    heads = model.whole("num_attention_heads", default=8)
    swiglu = model.flag("swiglu", default=True)
    usual = ceil(hidden * (8 / 3 if swiglu else 4) / 64) * 64
    ffn = model.whole("ffn_hidden_size", default=usual)
    unit = model.whole("make_vocab_size_divisible_by", default=128)
    # Not times tp, as in Megatron-LM: the example pads so that its checkpoints fit every tp.
    unit = lcm(unit, parallel.whole("tensor_model_parallel_size", default=1))
    mla = _mla(extra)
    layers = model.whole("num_layers", default=4)
    pattern = _pattern(model)
    if model.values.get("kind") == "hybrid" and pattern:
        layers = len(pattern)
    norm = model.text("normalization", "RMSNorm", ("RMSNorm", "LayerNorm"))
    positions = model.text("position_embedding_type", "rope", ("rope", "learned_absolute", "none"))
    learned = positions == "learned_absolute"
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
        rotary_base=model.number("rotary_base", default=10000.0, above=0.0),
        moe=_moe(extra, ffn),
        mla=mla,
    )


def _pattern(model: Fields) -> str:
    """The letters of a hybrid stack, one a layer."""
    return str(model.values.get("hybrid_layer_pattern") or "").split("/")[0].replace("|", "")


def _hybrid(model: Fields) -> tuple[bool, tuple[str, ...]]:
    """Whether a hybrid stack holds Mamba layers, and what to know of its numbers."""
    if model.text("kind", "gpt", ("gpt", "hybrid")) != "hybrid":
        return False, ()
    pattern = _pattern(model)
    if not pattern:
        text = f"{model.source}: kind hybrid without hybrid_layer_pattern"
        model.problems.append(Problem(text, "it has a letter for each layer", "'*-*-'"))
    return "M" in pattern, (
        "memory and bytes are of GPT layers, each with attention and MLP: hybrid stacks are not "
        "modelled",
    )


def _mla(extra: Fields) -> MLAShape | None:
    if not extra.flag("multi_latent_attention"):
        return None
    return MLAShape(
        q_lora_rank=extra.whole("q_lora_rank", default=512)
        if extra.values.get("q_lora_rank", 512) is not None
        else None,
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
    local = fields.text("local_attention", "auto", ("auto", "spec", "sdpa"))
    mamba, notes = _hybrid(fields)
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
        runs_on=OURS,
        mamba=mamba,
        notes=notes,
    )
