"""Checkpoints of this example as Hugging Face Llama models, and back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from math import gcd
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ulysses_mc.parallel_state import ParallelConfig, RankGrid, initialize_model_parallel

from . import checkpoint, llama_names, manifest
from .config import Config, ModelOptions, TrainingOptions
from .errors import UserError
from .model import build_chunk, transformer_config
from .model_rules import ffn_hidden_size
from .preflight import RunShape
from .run import on_device, quiet

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Megatron on this process alone."""
    cpu = torch.device("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with on_device(cpu), quiet():
            initialize_model_parallel(ParallelConfig(), use_megatron=True)
            yield
    finally:
        dist.destroy_process_group()


def to_hf(source: Path, target: Path) -> str:
    """Writes the checkpoint `source` as a Llama into `target`; returns what was done."""
    from megatron.core import dist_checkpointing

    _check_new(target)
    path = manifest.newest(source) if (source / manifest.LATEST).is_file() else source
    config, vocab = _saved_config(path)
    manifest.verify(path)
    checkpoint.check_metadata(path / ".metadata")
    table = dist_checkpointing.load_tensors_metadata(str(path))["embedding.word_embeddings.weight"]
    rows = int(table.global_shape[0])
    model = _model(config, rows)
    checkpoint.load_weights(path, [model])
    options = _llama_options(config, rows)
    # Megatron's rows beyond the vocabulary take part in its softmax: kept, for equal logits.
    options["ulysses_mc"] = {"vocab_size": vocab, "iteration": manifest.read_run(path)["iteration"]}
    llama = _empty_llama(options, DTYPES[config.training.precision])
    weights = llama_names.to_llama(_weights(model), options["num_key_value_heads"], _head(config))
    llama.load_state_dict(weights, strict=False)
    _check_complete(llama, weights)
    llama.save_pretrained(target)
    return f"wrote {target}: {path.name} as a Llama of {llama.num_parameters():,} parameters"


def from_hf(source: Path, target: Path) -> str:
    """Writes the Llama in `source` as a checkpoint of iteration 0 below `target`."""
    import yaml

    _check_new(target)
    facts, config = _read_llama_config(source)
    precision = _precision(source)
    llama = _read_llama(source, DTYPES[precision], config.model.share_embeddings_and_output_weights)
    config = dataclasses.replace(config, training=TrainingOptions(precision=precision))
    model, options = _model(config, facts["vocab_size"]), config.model
    groups = options.num_query_groups or options.num_attention_heads
    weights = llama_names.to_megatron(dict(llama.state_dict()), groups, _head(config))
    if options.share_embeddings_and_output_weights:
        weights.pop("output_layer.weight", None)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or [name for name in missing if not name.endswith("_extra_state")]:
        raise UserError(f"{source} is no Llama: lacks {missing}, has {unexpected} besides")
    state = checkpoint.sharded_weights([model])
    shape = _shape(config, facts["vocab_size"])
    path = checkpoint.write(
        target / "checkpoints", config, shape, checkpoint.Progress(), state, weights_only=True
    )
    model_yaml = {k: v for k, v in dataclasses.asdict(options).items() if v is not None}
    text = yaml.safe_dump({"model": model_yaml, "training": {"precision": precision}})
    (target / "model.yaml").write_text(text)
    return f"wrote {path} and {target / 'model.yaml'}"


def _read_llama_config(source: Path) -> tuple[dict[str, Any], Config]:
    try:
        facts: dict[str, Any] = json.loads((source / "config.json").read_text())
        return facts, _config_of_llama(facts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{source / 'config.json'} does not describe a Llama: {error!r:.200}"
        ) from None


def _precision(source: Path) -> Literal["fp32", "bf16"]:
    """Of the weights themselves: config.json's `dtype` would have them rounded, bit by bit equal
    no longer."""
    from safetensors import SafetensorError, safe_open

    found = set()
    try:
        for path in source.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{source} cannot be read as a Llama: {error!s:.300}") from None
    if found == {"F32"}:
        return "fp32"
    if found == {"BF16"}:
        return "bf16"
    raise UserError(
        f"the *.safetensors in {source} hold {' and '.join(sorted(found)) or 'nothing'}: it takes "
        "weights that are all F32 or all BF16"
    )


def _read_llama(source: Path, dtype: torch.dtype, tied: bool) -> Any:
    """Every weight comes from the files: transformers would draw the missing ones."""
    from safetensors import SafetensorError
    from transformers import LlamaForCausalLM

    try:
        llama, told = LlamaForCausalLM.from_pretrained(
            source, use_safetensors=True, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{source} cannot be read as a Llama: {error!s:.300}") from None
    wrong = {what: sorted(map(str, told[what])) for what in told if told[what]}
    if wrong:
        text = "; ".join(
            f"{what.replace('_', ' ')} {', '.join(names[:3])}" + ", ..." * (len(names) > 3)
            for what, names in wrong.items()
        )
        raise UserError(f"the weights in {source} do not fit its config.json: {text}")
    head, table = llama.lm_head.weight, llama.model.embed_tokens.weight
    if tied and not torch.equal(head, table):
        raise UserError(
            f"{source / 'config.json'} says tie_word_embeddings, but lm_head.weight is not the "
            "embedding: set it to false"
        )
    return llama


def _check_new(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is already there; name a new folder")


def _saved_config(path: Path) -> tuple[Config, int]:
    """The config that describes a checkpoint's model, and its vocabulary without padding."""
    run = manifest.read_run(path)
    try:
        model = ModelOptions(**run["model"], seq_length=run["seq_length"])
    except TypeError as error:
        raise UserError(f"{path / 'run.json'} is damaged: {error}") from None
    wrong = {
        "kind": model.kind == "gpt",
        "normalization": model.normalization == "RMSNorm",
        "swiglu": model.swiglu,
        "position_embedding_type": model.position_embedding_type == "rope",
        "transformer": set(model.transformer) <= {"kv_channels", "layernorm_epsilon"},
    }
    for name, fits in wrong.items():
        if not fits:
            raise UserError(f"a Llama has no model.{name} {getattr(model, name)!r}")
    precision = TrainingOptions(precision=run["precision"])
    return Config(model=model, training=precision, device="cpu"), int(run["model"]["vocab_size"])


def _llama_options(config: Config, rows: int) -> dict[str, Any]:
    model = config.model
    return {
        "vocab_size": rows,
        "hidden_size": model.hidden_size,
        "intermediate_size": ffn_hidden_size(config),
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups or model.num_attention_heads,
        "head_dim": _head(config),
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.transformer.get("layernorm_epsilon", 1e-5),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(model.rotary_base)},
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _config_of_llama(facts: dict[str, Any]) -> Config:
    rope = facts.get("rope_parameters") or {"rope_theta": facts.get("rope_theta", 10000.0)}
    scaled = facts.get("rope_scaling") or rope.get("rope_type", "default") != "default"
    for name, fits in {
        "model_type": facts.get("model_type") == "llama",
        "hidden_act": facts.get("hidden_act", "silu") == "silu",
        "attention_bias": not facts.get("attention_bias"),
        "mlp_bias": not facts.get("mlp_bias"),
        "rope_parameters": not scaled,
        "partial_rotary_factor": (rope | facts).get("partial_rotary_factor", 1.0) == 1.0,
    }.items():
        if not fits:
            raise UserError(f"cannot convert a model with {name} {facts.get(name)!r}")
    heads, hidden = facts["num_attention_heads"], facts["hidden_size"]
    transformer: dict[str, Any] = {}
    if facts.get("head_dim", hidden // heads) != hidden // heads:
        transformer["kv_channels"] = facts["head_dim"]
    if facts["rms_norm_eps"] != 1e-5:
        transformer["layernorm_epsilon"] = facts["rms_norm_eps"]
    rows = facts["vocab_size"]
    vocab, base = facts.get("ulysses_mc", {}).get("vocab_size", rows), rope["rope_theta"]
    if not isinstance(vocab, int) or not 0 < vocab <= rows:
        raise ValueError(f"ulysses_mc.vocab_size {vocab!r} of an embedding of {rows} rows")
    if base != int(base):
        raise ValueError(f"rope_theta {base}: Megatron's rotary_base is a whole number")
    model = ModelOptions(
        num_layers=facts["num_hidden_layers"],
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=facts.get("num_key_value_heads") or heads,
        ffn_hidden_size=facts["intermediate_size"],
        seq_length=facts["max_position_embeddings"],
        vocab_size=vocab,
        make_vocab_size_divisible_by=gcd(rows, 128),
        rotary_base=int(base),
        share_embeddings_and_output_weights=bool(facts.get("tie_word_embeddings")),
        transformer=transformer,
    )
    return Config(model=model, device="cpu")


def _shape(config: Config, rows: int) -> RunShape:
    length, vocab = config.model.seq_length, config.model.vocab_size or rows
    return RunShape(RankGrid(ParallelConfig(), 1), 1, 1, length, length, 1, vocab, rows)


def _model(config: Config, rows: int) -> torch.nn.Module:
    megatron = transformer_config(config, torch.device("cpu"))
    return build_chunk(config, _shape(config, rows), megatron, None)


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def _head(config: Config) -> int:
    model = config.model
    return int(
        model.transformer.get("kv_channels") or model.hidden_size // model.num_attention_heads
    )


def _empty_llama(options: dict[str, Any], dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**options)).to(dtype)


def _check_complete(llama: Any, weights: dict[str, torch.Tensor]) -> None:
    tied = {"lm_head.weight"} if llama.config.tie_word_embeddings else set()
    assert llama.state_dict().keys() - tied == weights.keys() - tied
