"""Every key of the example's config with the kind of its values; a test holds it to the source.

A kind is a type, a tuple of the allowed words, or a `Range`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf, isfinite
from typing import Any

from .problems import Problem


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; whole ones if `whole`."""

    low: float = 0.0
    high: float = inf
    whole: bool = False

    def rule(self) -> str:
        number = "a whole number" if self.whole else "a number"
        return f"{number} from {self.low:g}" + (f" to {self.high:g}" if self.high < inf else " up")

    def holds(self, value: Any) -> bool:
        kinds = int if self.whole else (int, float)
        known = isinstance(value, kinds) and not isinstance(value, bool) and isfinite(value)
        return known and self.low <= value <= self.high


COUNT, ANY_COUNT = Range(1, whole=True), Range(0, whole=True)
PART = Range(0, 1)
Kind = type | tuple[str, ...] | Range
KEYS: dict[str, dict[str, Kind]] = {
    "parallel": {
        "tensor_model_parallel_size": COUNT, "pipeline_model_parallel_size": COUNT,
        "ulysses_parallel_size": COUNT, "ring_parallel_size": COUNT,
        "expert_model_parallel_size": COUNT, "expert_tensor_parallel_size": COUNT,
        "data_parallel_size": COUNT, "virtual_pipeline_model_parallel_size": COUNT, "order": str,
        "distributed_timeout_minutes": Range(0),
    },
    "model": {
        "kind": ("gpt", "hybrid"), "num_layers": COUNT, "hidden_size": COUNT,
        "num_attention_heads": COUNT, "num_query_groups": COUNT, "ffn_hidden_size": COUNT,
        "seq_length": COUNT, "vocab_size": COUNT, "make_vocab_size_divisible_by": COUNT,
        "normalization": ("RMSNorm", "LayerNorm"), "swiglu": bool,
        "position_embedding_type": ("rope", "learned_absolute", "none"), "rotary_base": COUNT,
        "share_embeddings_and_output_weights": bool, "hybrid_layer_pattern": str,
        "transformer_impl": ("local", "transformer_engine"),
        "local_attention": ("auto", "spec", "sdpa"),
        "recompute": ("none", "selective", "full"), "attention_dropout": PART,
        "hidden_dropout": PART, "transformer": dict,
    },
    "batch": {"micro_batch_size": COUNT, "global_batch_size": COUNT},
    "optimizer": {
        "lr": Range(0), "min_lr": Range(0),
        "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root"),
        "lr_warmup_iters": ANY_COUNT, "lr_decay_iters": COUNT, "weight_decay": Range(0),
        "adam_beta1": PART, "adam_beta2": PART, "adam_eps": Range(0), "clip_grad": Range(0),
        "use_distributed_optimizer": bool, "overlap_grad_reduce": bool,
        "overlap_param_gather": bool,
    },
    "training": {"train_iters": COUNT, "seed": ANY_COUNT, "precision": ("fp32", "bf16"),
                 "self_check": bool},
    "data": {
        "path": list, "split": str, "description": str, "eod_mask_loss": bool, "cache": str,
        "isolate_documents": bool,
    },
    "evaluation": {"interval": ANY_COUNT, "iters": ANY_COUNT, "micro_batch_size": COUNT,
                   "global_batch_size": COUNT, "seq_length": COUNT},
    "checkpoint": {"interval": ANY_COUNT, "resume": bool, "load": str, "verify": bool},
    "logging": {"interval": COUNT, "tensorboard": bool, "plot": bool,
                "peak_tflops_per_gpu": Range(0)},
}  # fmt: skip
TOP: dict[str, Kind] = {"output": str, "device": ("auto", "cpu", "cuda")}
# Read with their own messages where the run is made.
_READ = {"parallel", "model", "batch"}


def key_problems(data: Mapping[str, Any], source: str) -> list[Problem]:
    """Unknown keys with the nearest known one, and values of the wrong kind."""
    problems = []
    for key, value in data.items():
        if key in TOP:
            problems += _value(f"{source}: {key}", value, TOP[key])
        elif key not in KEYS:
            problems.append(_unknown(source, str(key), (*KEYS, *TOP)))
        elif isinstance(value, dict):
            for name, inner in value.items():
                if name not in KEYS[key]:
                    problems.append(_unknown(source, f"{key}.{name}", tuple(KEYS[key])))
                elif key not in _READ:
                    problems += _value(f"{source}: {key}.{name}", inner, KEYS[key][name])
        elif value is not None:
            text = f"{source}: {key} is {value!r}"
            problems.append(Problem(text, "a section with keys of its own"))
    return problems


def _unknown(source: str, key: str, known: tuple[str, ...]) -> Problem:
    """The nearest key of the section; or the same key where another section has it."""
    group, _, name = key.rpartition(".")
    near = get_close_matches(name, known, n=1, cutoff=0.7)
    elsewhere = [f"{section}.{other}" for section, keys in KEYS.items() for other in keys
                 if other == name or name in (other.replace("_", ""), f"{other}s")]  # fmt: skip
    if not near and not elsewhere:
        everywhere = {other: f"{section}.{other}" for section, keys in reversed(KEYS.items())
                      for other in keys}  # fmt: skip
        elsewhere = [everywhere[n] for n in get_close_matches(name, everywhere, n=1, cutoff=0.7)]
    found = [f"{group}.{n}" if group else n for n in near] or elsewhere[:1]
    where = f"in {group}" if group else "of a config"
    return Problem(f"{source}: unknown key {key!r}", f"every key is one {where}", "".join(found))


def _value(name: str, value: Any, kind: Kind) -> list[Problem]:
    if value is None:
        return []
    text = f"{name} is {value!r}"
    if isinstance(kind, Range):
        return [] if kind.holds(_as_number(value)) else [Problem(text, kind.rule())]
    if isinstance(kind, tuple):
        near = get_close_matches(str(value).lower(), kind, n=1, cutoff=0.4)
        ok = value in kind
        return [] if ok else [Problem(text, f"one of {', '.join(kind)}", "".join(near))]
    words = {str: "text", bool: "true or false", list: "a list", dict: "keys of its own"}
    return [] if isinstance(value, kind) else [Problem(text, words[kind])]


def _as_number(value: Any) -> Any:
    """YAML reads 3e-4 (without a point) as text; the example reads it as a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
