"""The sizes and the rank order of a run, checked when they are written down. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches

from .errors import ParallelConfigError

ORDER_NAMES = ("tp", "ulysses", "ring", "ep", "dp", "pp")

# What other programs call the same axis, for the suggestion in an error.
_SYNONYMS = {
    "tensor": "tp",
    "mp": "tp",
    "sp": "ulysses",
    "sequence": "ulysses",
    "usp": "ulysses",
    "context": "cp",
    "expert": "ep",
    "etp": "tp",
    "edp": "dp",
    "data": "dp",
    "fsdp": "dp",
    "pipe": "pp",
    "pipeline": "pp",
}
_SIZE_OF = {
    "tp": "tensor_model_parallel_size",
    "ulysses": "ulysses_parallel_size",
    "ring": "ring_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
    "pp": "pipeline_model_parallel_size",
}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the ranks of a run share the model and the sequence.

    Args:
        tensor_model_parallel_size: ranks that share each weight matrix (Megatron's TP).
        pipeline_model_parallel_size: stages that share the layers (PP).
        ulysses_parallel_size: ranks that share a sequence and exchange heads.
        ring_parallel_size: ranks that share a sequence and pass keys and values around,
            outside Ulysses. Megatron's context_parallel_size is ulysses x ring.
        expert_model_parallel_size: ranks that share the experts of an MoE layer (EP).
        expert_tensor_parallel_size: ranks that share each expert's matrices; None: as TP.
        data_parallel_size: replicas of the model; None: what the world size leaves.
        virtual_pipeline_model_parallel_size: model chunks of a stage (interleaved pipeline).
        order: axis names from the fastest-varying to the slowest; "cp" stands for
            "ulysses-ring". An axis of size 1 may be left out.
        distributed_timeout_minutes: minutes after which a collective of any group, or the
            comparison of settings between ranks, is given up.

    Raises:
        ParallelConfigError: listing every problem at once.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    ulysses_parallel_size: int = 1
    ring_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    data_parallel_size: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    order: str = "tp-ulysses-ring-ep-dp-pp"
    distributed_timeout_minutes: float = 30.0

    def __post_init__(self) -> None:
        problems = [*_size_problems(self), *_order_problems(self)]
        if problems:
            count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
            given = (f for f in fields(self) if getattr(self, f.name) != f.default)
            shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in given)
            found, rules, nearest = zip(*problems, strict=True)
            raise ParallelConfigError(
                f"ParallelConfig({shown}) has {count}.",
                "\n  ".join(found),
                "; ".join(dict.fromkeys(rules)) + ".",
                "; ".join(text for text in dict.fromkeys(nearest) if text),
            )

    @property
    def context_parallel_size(self) -> int:
        """Ranks that share one sequence: ulysses x ring, Megatron's context-parallel size."""
        return self.ulysses_parallel_size * self.ring_parallel_size

    @property
    def model_size(self) -> int:
        """Ranks of one replica: tp x ulysses x ring x pp."""
        return (
            self.tensor_model_parallel_size
            * self.context_parallel_size
            * self.pipeline_model_parallel_size
        )

    @property
    def etp_size(self) -> int:
        """expert_tensor_parallel_size, or Megatron's default for it, the tensor-parallel size."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def expert_model_size(self) -> int:
        """Ranks of one replica of the experts: expert-tensor x ep x pp."""
        return self.etp_size * self.expert_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def has_experts(self) -> bool:
        """Whether the expert layers are divided otherwise than the dense ones."""
        return (
            self.expert_model_parallel_size > 1 or self.etp_size != self.tensor_model_parallel_size
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """All six axis names in order: missing ones stand before a final pp, ring after ulysses."""
        names = _expand(self.order)
        if "ring" in names and "ulysses" not in names:
            names.insert(names.index("ring"), "ulysses")
        if "ulysses" in names and "ring" not in names:
            names.insert(names.index("ulysses") + 1, "ring")
        end = len(names) - 1 if names[-1:] == ["pp"] else len(names)
        names[end:end] = [name for name in ORDER_NAMES if name not in names]
        return tuple(names)

    @property
    def names_data_parallel(self) -> bool:
        """Whether the order string says where the data-parallel axis lies."""
        return "dp" in _expand(self.order)

    @property
    def megatron_order(self) -> str:
        """The order in Megatron's names, with cp for ulysses-ring."""
        return "-".join("cp" if axis == "ulysses" else axis for axis in self.axes if axis != "ring")


def _expand(order: str) -> list[str]:
    """The names of an order string, cp written out."""
    names = [name for name in order.lower().split("-") if name]
    return [axis for name in names for axis in (["ulysses", "ring"] if name == "cp" else [name])]


def closest(name: str, known: tuple[str, ...]) -> str:
    """The known name nearest to `name`, or all of them."""
    candidates = {**_SYNONYMS, **{axis: axis for axis in known}}
    match = get_close_matches(name.lower(), candidates, n=1, cutoff=0.5)
    return repr(candidates[match[0]]) if match else " or ".join(map(repr, known))


_SHORTEST, _LONGEST = 0.001, 525600  # minutes; PyTorch counts in milliseconds and overflows

Problem = tuple[str, str, str]  # what is wrong, the rule, what would work


def _size_problems(config: ParallelConfig) -> list[Problem]:
    problems: list[Problem] = []
    for name in (f.name for f in fields(config) if f.name.endswith("_size")):
        size = getattr(config, name)
        if size is None and type(config).__dataclass_fields__[name].default is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            problems.append(
                (f"{name} is {size!r}", "sizes are whole numbers from 1 up", f"{name}=1")
            )
    timeout, name = config.distributed_timeout_minutes, "distributed_timeout_minutes"
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not (is_number and _SHORTEST <= timeout <= _LONGEST):  # nor is NaN
        rule = f"{name} is positive, from {_SHORTEST} (60 ms) to {_LONGEST} (a year)"
        problems.append((f"{name} is {timeout!r}", rule, f"{name}=30"))
    stages, chunks = (
        config.pipeline_model_parallel_size,
        config.virtual_pipeline_model_parallel_size,
    )
    if chunks is not None and stages == 1:
        problems.append(
            (
                f"virtual_pipeline_model_parallel_size={chunks} with one pipeline stage",
                "an interleaved pipeline has two stages or more",
                "virtual_pipeline_model_parallel_size=None or pipeline_model_parallel_size=2",
            )
        )
    return problems


def _order_problems(config: ParallelConfig) -> list[Problem]:
    if not isinstance(config.order, str):
        default = type(config).order
        return [(f"order is {config.order!r}", "order is a string", f"order={default!r}")]
    names, problems = _expand(config.order), list[Problem]()
    known = "order holds the names " + ", ".join((*ORDER_NAMES, "cp"))
    for name in dict.fromkeys(names):
        if name not in ORDER_NAMES:
            near = closest(name, (*ORDER_NAMES, "cp"))
            problems.append(
                (f"order names an unknown axis {name!r}", known, f"{near} for {name!r}")
            )
        elif names.count(name) > 1:
            rule = "each axis stands once in the order"
            problems.append((f"order names {name!r} {names.count(name)} times", rule, ""))
    for name in ORDER_NAMES:
        size = getattr(config, _SIZE_OF[name]) or 1
        if name not in names and size != 1:
            rule = "an axis larger than 1 stands in the order"
            problems.append(
                (f"order {config.order!r} lacks {name!r}, of size {size}", rule, f"add {name!r}")
            )
    if {"ulysses", "ring"} <= set(names) and names.index("ring") != names.index("ulysses") + 1:
        rest = [name for name in names if name != "ring"]
        rest.insert(rest.index("ulysses") + 1, "ring")
        problems.append(
            (
                f"order {config.order!r} puts ring elsewhere than directly outside ulysses",
                "ring follows ulysses, as both together are Megatron's cp axis",
                f"order={'-'.join(rest)!r}",
            )
        )
    return problems
