"""Every key of the example's config with the kind of its values; a test holds it to the source.

A kind is a type, a tuple of the allowed words, or a `Range`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf, isfinite
from typing import Any

from .problems import Problem


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; whole ones if `whole`, neither end if `inside`,
    not `high` if `below`."""

    low: float = 0.0
    high: float = inf
    whole: bool = False
    inside: bool = False
    below: bool = False

    def rule(self) -> str:
        number = "a whole number" if self.whole else "a number"
        if self.inside:
            return f"{number} above {self.low:g} and below {self.high:g}"
        if self.below:
            return f"{number} from {self.low:g}, below {self.high:g}"
        return f"{number} from {self.low:g}" + (f" to {self.high:g}" if self.high < inf else " up")

    def holds(self, value: Any) -> bool:
        kinds = int if self.whole else (int, float)
        known = isinstance(value, kinds) and not isinstance(value, bool) and isfinite(value)
        left_out = (self.low, self.high) if self.inside else (self.high,) if self.below else ()
        return known and self.low <= value <= self.high and value not in left_out


COUNT, ANY_COUNT = Range(1, whole=True), Range(0, whole=True)
PART, BETA = Range(0, 1), Range(0, 1, below=True)
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
        "lr": Range(0, 1000), "min_lr": Range(0, 1000),
        "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root"),
        "lr_warmup_iters": ANY_COUNT, "lr_decay_iters": COUNT, "weight_decay": Range(0),
        "adam_beta1": BETA, "adam_beta2": BETA, "adam_eps": Range(0, 1, inside=True),
        "clip_grad": Range(0),
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
LR, MIN_LR = 1e-3, 1e-4  # where a config says nothing
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
            if key == "optimizer":
                rates = value.get("lr", LR), value.get("min_lr", MIN_LR)
                problems += rate_problems(*rates, f"{source}: ")
        elif value is not None:
            text = f"{source}: {key} is {value!r}"
            problems.append(Problem(text, "a section with keys of its own"))
    return problems


def keys_given_twice(node: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """(dotted key, line of the second) in a file that `yaml.compose` has read: `yaml.safe_load`
    takes the last without a word."""
    seen = set()
    for key, value in node.value if getattr(node, "id", "") == "mapping" else ():
        name = f"{prefix}{key.value}"
        if name in seen:
            yield name, key.start_mark.line + 1
        seen.add(name)
        yield from keys_given_twice(value, f"{name}.")


def rate_problems(
    lr: Any,
    min_lr: Any,
    source: str = "",
    names: tuple[str, str] = ("optimizer.lr", "optimizer.min_lr"),
) -> list[Problem]:
    """Whether min_lr is at most lr, which Megatron's scheduler asserts once the model is built.

    Args:
        lr, min_lr: what was given; what is not a number is told elsewhere.
        source: what stands before the message.
        names: what the two are called there.
    """
    high, low = _as_number(lr), _as_number(min_lr)
    if not (Range().holds(high) and Range().holds(low)) or low <= high:
        return []
    text = f"{source}{names[1]} {low:g} with {names[0]} {high:g}"
    rule = f"the rate falls from {names[0]} to {names[1]}"
    return [Problem(text, rule, f"{names[1]} {high:g} or {names[0]} {low:g}")]


def value_problems(data: Mapping[str, Any]) -> list[Problem]:
    """Values that are out of range, and rates that contradict one another.

    Args:
        data: a whole config, every key there; its sizes (`parallel`) are checked elsewhere.
    """
    inside = [
        _value(f"{section}.{name}", data[section][name], kind)
        for section, keys in KEYS.items()
        for name, kind in keys.items()
        if section != "parallel"
    ]
    rates = data["optimizer"]["lr"], data["optimizer"]["min_lr"]
    return [*(p for found in inside for p in found), *rate_problems(*rates)]


def rule_of(key: str) -> str:
    """What the value of a dotted key is, in words: `one of gpt, hybrid`."""
    section, _, name = key.partition(".")
    kind = TOP.get(section) if not name else KEYS.get(section, {}).get(name)
    return "a section with keys of its own" if kind is None else _rule(kind)


def _rule(kind: Kind) -> str:
    if isinstance(kind, Range):
        return kind.rule()
    if isinstance(kind, tuple):
        return f"one of {', '.join(kind)}"
    return {str: "text", bool: "true or false", list: "a list", dict: "keys of its own"}[kind]


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
        return [] if kind.holds(_as_number(value)) else [Problem(text, _rule(kind))]
    if isinstance(kind, tuple):
        near = get_close_matches(str(value).lower(), kind, n=1, cutoff=0.4)
        return [] if value in kind else [Problem(text, _rule(kind), "".join(near))]
    return [] if isinstance(value, kind) else [Problem(text, _rule(kind))]


def _as_number(value: Any) -> Any:
    """YAML reads 3e-4 (without a point) as text; the example reads it as a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
