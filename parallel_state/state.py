"""The process groups of one rank, over a RankGrid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .config import ParallelConfig
from .deepspeed_names import DeepSpeedNames
from .errors import ParallelConfigError
from .grid import RankGrid
from .picture import describe_grid

Axes = tuple[str, ...]

# What a run is given without asking. Most coincide: with pp 1 and ring 1 and no experts these
# are tp, ulysses, dp, dp x ulysses, tp x ulysses and the groups of a single rank.
STANDARD_GROUPS: tuple[Axes, ...] = (
    ("tp",),
    ("ulysses",),
    ("ring",),
    ("cp",),
    ("dp",),
    ("pp",),
    ("dp", "ulysses"),
    ("dp", "cp"),
    ("tp", "pp"),
    ("tp", "cp"),
    ("etp",),
    ("ep",),
    ("edp",),
    ("etp", "ep"),
    ("etp", "ep", "pp"),
)


class ParallelState(DeepSpeedNames):
    """Process groups, ranks and meshes of this process; made by `initialize_model_parallel`.

    Axes are those of RankGrid: tp, ulysses, ring, cp (= ulysses x ring), dp, pp, and for experts
    etp, ep, edp. `state.group("dp", "ulysses")` is the group over both. It can be handed to
    DeepSpeed as `mpu`: see `DeepSpeedNames`.

    Args:
        grid: who is where.
        global_rank: this process.
        adopted: Megatron's groups, by axes.
        created: the other groups of this rank, by their ranks; one for each set of ranks.
        num_groups_created: groups made beside Megatron's, of all ranks.
        started_megatron: whether Megatron was initialised for this state, and ends with it.
    """

    def __init__(
        self,
        grid: RankGrid,
        global_rank: int,
        *,
        adopted: Mapping[Axes, dist.ProcessGroup] | None = None,
        created: Mapping[tuple[int, ...], dist.ProcessGroup] | None = None,
        num_groups_created: int = 0,
        started_megatron: bool = False,
    ) -> None:
        self.grid, self.global_rank = grid, global_rank
        self.num_groups_created, self.started_megatron = num_groups_created, started_megatron
        self._adopted = {frozenset(axes): group for axes, group in (adopted or {}).items()}
        self._created = dict(created or {})
        self._destroyed = False

    def __repr__(self) -> str:
        shape = [*self.grid.dense_shape]
        if self.config.has_experts:
            shape += [pair for pair in self.grid.expert_shape if pair not in shape]
        sizes = " x ".join(f"{axis} {size}" for axis, size in shape)
        ended = ", destroyed" if self._destroyed else ""
        return (
            f"<ParallelState of rank {self.global_rank} in {self.grid.world_size}: {sizes}{ended}>"
        )

    @property
    def config(self) -> ParallelConfig:
        """The sizes and order that the state was made from."""
        return self.grid.config

    def group(self, *axes: str) -> dist.ProcessGroup:
        """This rank's process group along `axes`.

        Raises:
            ParallelConfigError: the group was not made; making one now would need all ranks.
        """
        if self._destroyed:
            raise ParallelConfigError(
                f"The group along {' x '.join(axes)} of a destroyed ParallelState.",
                rule="call initialize_model_parallel again, and use the state it returns.",
            )
        ranks = self.ranks(*axes)
        group = self._adopted.get(self._megatron_axes(axes)) or self._created.get(ranks)
        if group is None:
            same = (g for axes_, g in self._adopted.items() if self.ranks(*axes_) == ranks)
            group = next(same, None)
        if group is None:
            raise ParallelConfigError(
                f"The group along {' x '.join(axes)} was not made.",
                rule="all ranks make a group together, in initialize_model_parallel.",
                nearest=f"initialize_model_parallel(..., extra_groups=[{axes!r}])",
            )
        return group

    def rank(self, *axes: str) -> int:
        """This rank's place in its group along `axes`."""
        return self.grid.index(self.global_rank, *axes)

    def world_size(self, *axes: str) -> int:
        """Size of a group along `axes`."""
        return self.grid.size(*axes)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Global ranks of this rank's group along `axes`."""
        return self.grid.group_of(self.global_rank, *axes)

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's place along every axis."""
        return self.grid.coordinates(self.global_rank)

    def mesh(self, *dims: str | Axes) -> DeviceMesh:
        """A DeviceMesh around groups that exist already; no communication.

        Each argument is one mesh dimension, the outermost first: an axis, or several flattened.

            fully_shard(model, mesh=state.mesh(("dp", "ulysses")))   # shard over both
            fully_shard(model, mesh=state.mesh("dp", "ulysses"))     # HSDP: copies over dp
            state.mesh("dp", "tp")["tp"]                             # DTensor's TP beside FSDP2

        Raises:
            ParallelConfigError: an axis twice, or a group that was not made.
        """
        named = [(dim,) if isinstance(dim, str) else tuple(dim) for dim in dims]
        flat = [axis for dim in named for axis in dim]
        if len(set(flat)) < len(flat):
            raise ParallelConfigError(
                f"A mesh of {dims!r}.", rule="an axis stands in one dimension of a mesh."
            )
        groups = [self.group(*dim) for dim in named]
        names = tuple("_".join(dim) for dim in named)
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], self.device_type, mesh_dim_names=names)
        ranks = torch.empty([self.world_size(*dim) for dim in named], dtype=torch.int)
        for rank in self.ranks(*flat):
            ranks[tuple(self.grid.index(rank, *dim) for dim in named)] = rank
        return DeviceMesh.from_group(groups, self.device_type, mesh=ranks, mesh_dim_names=names)

    @property
    def device_type(self) -> str:
        """ "cuda" if the default group speaks NCCL, else "cpu"."""
        return "cuda" if "nccl" in dist.get_backend() else "cpu"

    def is_megatrons(self, *axes: str) -> bool:
        """Whether the group along `axes` is one of Megatron's."""
        return any(group is self.group(*axes) for group in self._adopted.values())

    def describe(self) -> str:
        """A table of the groups: sizes, this rank's place and peers, and who made each."""
        owners = {axes: self._owner(axes) for axes in STANDARD_GROUPS}
        return describe_grid(self.grid, self.global_rank, owners)

    @property
    def destroyed(self) -> bool:
        """Whether `destroy` was called."""
        return self._destroyed

    def destroy(self) -> None:
        """End the groups of this state, and Megatron's if it was started for it."""
        if self._destroyed:
            return
        self._destroyed = True
        end_groups(self._created.values())
        if self.started_megatron:
            from . import megatron_groups

            megatron_groups.destroy()

    def _owner(self, axes: Axes) -> str:
        return "Megatron" if self.is_megatrons(*axes) else "ulysses_mc"

    def _megatron_axes(self, axes: Iterable[str]) -> frozenset[str]:
        """`axes` in Megatron's names: what of ulysses x ring is not of size 1 is its cp."""
        sequence = {"ulysses", "ring", "cp"}
        names, asked = set(axes) - sequence, set(axes) & sequence
        if asked and self.world_size(*asked) == self.world_size("cp"):
            names.add("cp")
        elif asked and self.world_size(*asked) > 1:
            names |= asked
        return frozenset(names)


def end_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy the groups that are still there: not those that ended with a former default group."""
    for group in dict.fromkeys(groups):
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def create_groups(
    grid: RankGrid,
    rank: int,
    kinds: Iterable[Axes],
    existing: Iterable[Axes],
    timeout: timedelta,
) -> tuple[dict[tuple[int, ...], dist.ProcessGroup], int]:
    """Make the groups along each of `kinds`, one for each set of ranks not yet grouped.

    All ranks make all groups, in one order, as torch.distributed.new_group asks. Equal sets of
    ranks share a group, so that the count is that of distinct sets: 8 ranks as tp2 x ulysses2 x
    dp2 make 4 tp + 4 ulysses + 4 dp + 2 dp x ulysses + 2 tp x ulysses + 8 single = 24 groups, and
    each rank belongs to 6; 8 ranks as ulysses8 make 1 + 8 single.

    Args:
        grid: who is where.
        rank: this process.
        kinds: axes of the groups to make, in order.
        existing: axes whose groups exist already (Megatron's).
        timeout: of every collective of the groups.

    Returns:
        This rank's new groups by their ranks, and the number of groups made on all ranks.
    """
    seen = {tuple(ranks) for axes in existing for ranks in grid.groups(*axes)}
    mine, count = {}, 0
    for axes in kinds:
        for ranks in map(tuple, grid.groups(*axes)):
            if ranks in seen:
                continue
            seen.add(ranks)
            count += 1
            name = "ulysses_mc " + " x ".join(axes)
            group = dist.new_group(list(ranks), timeout=timeout, group_desc=name)
            if rank in ranks:
                mine[ranks] = group
    return mine, count
