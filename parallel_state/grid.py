"""Which ranks form which group: pure arithmetic, without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod

from . import fitting
from .config import ParallelConfig, closest
from .errors import ParallelConfigError

DENSE_AXES = ("tp", "ulysses", "ring", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
AXES = (*DENSE_AXES, "cp", "etp", "ep", "edp")

Shape = tuple[tuple[str, int], ...]  # (axis, size), the fastest-varying first


@dataclass(frozen=True)
class RankGrid:
    """All ranks as one array whose axes are the kinds of parallelism; a group is a slice of it.

    A group along some axes holds the ranks that agree in all other axes, in ascending order.
    The experts of an MoE layer lie on a second array over the same ranks, with the axes etp
    (expert-tensor), ep and edp (expert data); pp is common to both. "cp" is ulysses and ring
    together. Equals Megatron's RankGenerator with context_parallel_size = ulysses x ring.

    Args:
        config: sizes and order.
        world_size: number of ranks.

    Raises:
        ParallelConfigError: the sizes do not multiply to the world, or the two arrays have
            different pipelines.

    Example:
        >>> config = ParallelConfig(tensor_model_parallel_size=2, ulysses_parallel_size=2)
        >>> RankGrid(config, 8).groups("ulysses")
        [[0, 2], [1, 3], [4, 6], [5, 7]]
        >>> RankGrid(config, 8).groups("dp", "ulysses")
        [[0, 2, 4, 6], [1, 3, 5, 7]]
    """

    config: ParallelConfig
    world_size: int

    def __post_init__(self) -> None:
        fitting.check_world(self.config, self.world_size)
        if self.sizes["dp"] > 1 and not self.config.names_data_parallel:
            raise ParallelConfigError(
                f"order {self.config.order!r} over {self.world_size} ranks.",
                f"Beside {self.config.model_size} ranks for a model replica, the order lacks 'dp', "
                f"of size {self.sizes['dp']}.",
                "an axis larger than 1 stands in the order.",
                f"order={'-'.join(self.config.axes)!r} or {self.config.model_size} ranks",
            )
        if self.config.has_experts:
            self.check_pipelines_agree()

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size of every axis."""
        config = self.config
        sizes = {
            "tp": config.tensor_model_parallel_size,
            "ulysses": config.ulysses_parallel_size,
            "ring": config.ring_parallel_size,
            "dp": self.world_size // config.model_size,
            "pp": config.pipeline_model_parallel_size,
            "cp": config.context_parallel_size,
            "etp": config.etp_size,
            "ep": config.expert_model_parallel_size,
        }
        # Not checked to be whole when no expert is divided: then it is dp x cp.
        return {**sizes, "edp": self.world_size // config.expert_model_size}

    @cached_property
    def dense_shape(self) -> Shape:
        """(axis, size) of the array of the dense layers, the fastest-varying axis first."""
        return tuple((axis, self.sizes[axis]) for axis in self.config.axes if axis != "ep")

    @cached_property
    def expert_shape(self) -> Shape:
        """(axis, size) of the array of the experts, the fastest-varying axis first."""
        renamed = {"tp": "etp", "dp": "edp"}
        axes = (renamed.get(a, a) for a in self.config.axes if a not in ("ulysses", "ring"))
        return tuple((axis, self.sizes[axis]) for axis in axes)

    def size(self, *axes: str) -> int:
        """Ranks in a group along `axes`."""
        return prod(self.sizes[axis] for axis in self._resolve(axes)[0])

    def groups(self, *axes: str) -> list[list[int]]:
        """Every group along `axes`, in Megatron's order; together they hold each rank once."""
        inside, shape = self._resolve(axes)
        offsets = _offsets(shape, lambda axis: axis in inside)
        starts = _offsets(shape, lambda axis: axis not in inside)
        return [[start + offset for offset in offsets] for start in starts]

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks of `rank`'s group along `axes`."""
        inside, shape = self._resolve(axes)
        offsets = _offsets(shape, lambda axis: axis in inside)
        start, stride = self._check_rank(rank), 1
        for axis, size in shape:
            if axis in inside:
                start -= rank // stride % size * stride
            stride *= size
        return tuple(start + offset for offset in offsets)

    def index(self, rank: int, *axes: str) -> int:
        """The place of `rank` in its group along `axes`."""
        inside, shape = self._resolve(axes)
        index, stride, step = 0, 1, 1
        for axis, size in shape:
            if axis in inside:
                index += self._check_rank(rank) // stride % size * step
                step *= size
            stride *= size
        return index

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of `rank` along every axis of both arrays."""
        return {axis: self.index(rank, axis) for axis in AXES}

    def check_pipelines_agree(self) -> None:
        """Refuse an order in which dense layers and experts have different pipeline stages.

        Megatron asks the same, for every model, with or without experts.
        """
        if self.sizes["pp"] == 1 or _stride(self.dense_shape) == _stride(self.expert_shape):
            return
        dense, expert = ("x".join(f"{a}{n}" for a, n in s if n > 1) for s in self._shapes)
        order = [name for name in self.config.axes if name != "pp"]
        raise ParallelConfigError(
            f"order {self.config.order!r} with pipeline_model_parallel_size={self.sizes['pp']}.",
            f"Dense layers lie on {dense}, with {_stride(self.dense_shape)} ranks between pipeline "
            f"neighbours; experts on {expert}, with {_stride(self.expert_shape)}.",
            "both have the same pipeline stages, which an order that ends in pp ensures.",
            f"order={'-'.join([*order, 'pp'])!r}",
        )

    def describe(self, rank: int | None = None) -> str:
        """A table of the axes and groups, with `rank`'s place in them if given."""
        from .picture import describe_grid

        return describe_grid(self, rank)

    def picture(self, *axes: str, ranks_per_node: int = 8, max_nodes: int = 8) -> str:
        """The groups along `axes` drawn over nodes x ranks, at most `max_nodes` lines of them."""
        from .picture import draw_groups

        return draw_groups(self, axes, ranks_per_node=ranks_per_node, max_nodes=max_nodes)

    @property
    def _shapes(self) -> tuple[Shape, Shape]:
        return self.dense_shape, self.expert_shape

    def _resolve(self, axes: tuple[str, ...]) -> tuple[frozenset[str], Shape]:
        """The axes with cp written out, and the array that they belong to."""
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown or not axes:
            what = ", ".join(map(repr, unknown)) or "none"
            raise ParallelConfigError(
                f"A group along {axes!r}: unknown axis {what}.",
                rule=f"a group lies along one or more of {', '.join(AXES)}.",
                nearest=", ".join(closest(axis, AXES) for axis in unknown),
            )
        names = {
            name for axis in axes for name in (("ulysses", "ring") if axis == "cp" else [axis])
        }
        if names <= set(DENSE_AXES):
            return frozenset(names), self.dense_shape
        if names <= set(EXPERT_AXES):
            return frozenset(names), self.expert_shape
        raise ParallelConfigError(
            f"A group along {' x '.join(axes)} mixes the axes of dense layers and of experts.",
            rule=f"either {', '.join(DENSE_AXES)} or {', '.join(EXPERT_AXES)}.",
        )

    def _check_rank(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ParallelConfigError(
                f"Rank {rank} of {self.world_size} ranks.",
                rule=f"ranks run from 0 to {self.world_size - 1}.",
            )
        return rank


def _offsets(shape: Shape, selected: Callable[[str], bool]) -> list[int]:
    """Ranks that differ from rank 0 only in the selected axes, ascending."""
    offsets, stride = [0], 1
    for axis, size in shape:
        if size > 1 and selected(axis):
            offsets = [offset + i * stride for i in range(size) for offset in offsets]
        stride *= size
    return offsets


def _stride(shape: Shape) -> int:
    """Ranks between neighbouring pipeline stages."""
    names = [axis for axis, _ in shape]
    return prod(size for _, size in shape[: names.index("pp")])
