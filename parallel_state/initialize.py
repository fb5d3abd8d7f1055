"""Making the groups of a run, and ending them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ulysses_mc import __version__

from . import megatron_groups
from .agreement import check_agreement
from .config import ParallelConfig
from .errors import ParallelConfigError
from .grid import RankGrid
from .state import STANDARD_GROUPS, Axes, ParallelState, create_groups


class _Current:
    """The states made here, oldest first: the only thing here that outlives a call.

    The module-level getters read the last one.
    """

    states: ClassVar[list[ParallelState]] = []


def initialize_model_parallel(
    config: ParallelConfig,
    *,
    use_megatron: bool | None = None,
    extra_groups: Iterable[Axes] = (),
    megatron_options: Mapping[str, Any] | None = None,
) -> ParallelState:
    """Make, or adopt, the process groups of `config`; every rank calls it with the same.

    With Megatron, its own initialize_model_parallel runs with context_parallel_size = ulysses x
    ring, and its groups are used: with ring 1 the Ulysses group *is* Megatron's context-parallel
    group. Only what Megatron lacks is made (ulysses and ring, and dp x ulysses, when both are
    larger than 1). A Megatron that is initialised already, as by Megatron-LM, is adopted.
    Without Megatron, the groups of `STANDARD_GROUPS` are made with torch.distributed.new_group;
    equal sets of ranks share one (see `create_groups` for the count).

    Args:
        config: sizes, order, and the timeout of every group.
        use_megatron: True or False; None: True if this process has imported
            `megatron.core.parallel_state` already. Having it installed is not enough: a plain
            PyTorch program neither pays for its import nor gets its groups.
        extra_groups: axes of further groups to make, such as `[("tp", "dp")]`.
        megatron_options: further keywords of Megatron's initialize_model_parallel, such as
            `num_distributed_optimizer_instances` or `create_gloo_process_groups`.

    Returns:
        The state, which is also what the module-level getters read from now on; when every rank
        has its groups.

    Raises:
        ParallelConfigError: on every rank alike, before the first group is made: settings that
            differ between ranks, sizes that do not multiply to the world, an order or option that
            Megatron refuses; or torch.distributed is not initialised. After the last one: a rank
            has not come (it failed while it made its groups); those made are ended.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ParallelConfigError(
            "initialize_model_parallel without torch.distributed.",
            rule="torch.distributed.init_process_group() comes first, under torchrun or with "
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.",
        )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    through_megatron = megatron_groups.resolve_use_megatron(use_megatron)
    kinds = [*STANDARD_GROUPS, *map(tuple, extra_groups)]
    options = dict(megatron_options or {})
    check_agreement(
        {
            **asdict(config),
            "world_size": world_size,
            "use_megatron": through_megatron,
            "extra_groups": kinds[len(STANDARD_GROUPS) :],
            "megatron_options": options,
            "ulysses_mc version": __version__,
            "torch version": str(torch.__version__),
        },
        timeout,
    )
    grid = RankGrid(config, world_size)
    for axes in kinds:
        grid.size(*axes)  # an unknown axis is refused before the first group
    adopted: dict[Axes, dist.ProcessGroup] = {}
    started = False
    if through_megatron:
        before = _Current.states[-1] if _Current.states else None
        started = megatron_groups.start_or_adopt(grid, options)
        # Initialised twice alike: whichever state is destroyed last ends Megatron.
        if before is not None and before.started_megatron and not before.destroyed:
            started = True
        adopted = megatron_groups.adopt(grid, rank)
    created, count = create_groups(grid, rank, kinds, adopted, timeout)
    state = ParallelState(
        grid,
        rank,
        adopted=adopted,
        created=created,
        num_groups_created=count,
        started_megatron=started,
    )
    try:
        # A rank that ended its groups now would close connections that others still wait for: gloo
        # takes that for a failure of theirs.
        check_agreement({"number of groups made": count}, timeout)
    except ParallelConfigError:
        state.destroy()
        raise
    _Current.states.append(state)
    return state


def get_parallel_state() -> ParallelState:
    """The state of the last initialize_model_parallel."""
    if not _Current.states:
        raise ParallelConfigError(
            "No parallel state in this process.",
            rule="ulysses_mc.parallel_state.initialize_model_parallel(config) comes first.",
        )
    return _Current.states[-1]


def model_parallel_is_initialized() -> bool:
    """Whether there is a state that the getters can read."""
    return bool(_Current.states)


def destroy_model_parallel() -> None:
    """End the groups of every state; another may then be initialised, with other sizes."""
    while _Current.states:
        _Current.states.pop().destroy()
