"""Megatron-core's own process groups: started through Megatron's initialiser, or adopted."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist

from .errors import ParallelConfigError
from .grid import RankGrid
from .state import end_groups

# Set from the ParallelConfig, or changing which ranks form a group.
_OURS = {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "distributed_timeout_minutes",
    "order",
}
_OTHER_GRID = {"gtp_remat_size", "expert_gtp_remat_size", "rank_offset", "local_world_size"}


def resolve_use_megatron(use_megatron: bool | None) -> bool:
    """Whether to go through Megatron: by default, if this process has imported it already.

    Merely having it installed must not cost a plain PyTorch program the 8 s of its import, nor
    start groups that nobody reads. A program that uses it has imported it at its top.
    """
    if use_megatron is None:
        return "megatron.core.parallel_state" in sys.modules
    if use_megatron and (find_spec("megatron") is None or find_spec("megatron.core") is None):
        raise ParallelConfigError(
            "use_megatron=True, but megatron-core is not installed.",
            rule="Megatron's groups need Megatron: pip install 'ulysses-mc[megatron]'.",
            nearest="use_megatron=False, for FSDP2, DeepSpeed or DDP",
        )
    return use_megatron


def start_or_adopt(grid: RankGrid, options: Mapping[str, Any]) -> bool:
    """Call Megatron's initialize_model_parallel unless somebody has; True if it was called here.

    Raises:
        ParallelConfigError: an unknown option, an order that Megatron refuses, or groups that
            Megatron was started with and that are not those of `grid`.
    """
    from megatron.core import parallel_state as mpu

    check_megatron_accepts(grid, options, mpu.initialize_model_parallel)
    config = grid.config
    if mpu.model_parallel_is_initialized():
        return False
    try:
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.etp_size,
            distributed_timeout_minutes=config.distributed_timeout_minutes,
            order=config.megatron_order,
            **options,
        )
    except BaseException:
        destroy()  # else the next attempt meets half of this one
        raise
    # Megatron leaves some of its groups at PyTorch's default, seen in 0.16.1.
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    # Public since PyTorch 2.14.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in mpu._global_process_group_list or []:
        if group is not None and dist.get_backend(group) != "fake":
            set_timeout(timeout, group)
    return True


def adopt(grid: RankGrid, rank: int) -> dict[tuple[str, ...], dist.ProcessGroup]:
    """Megatron's groups of this rank, by axes; each has exactly the ranks that `grid` says."""
    from megatron.core import parallel_state as mpu

    adopted: dict[tuple[str, ...], dist.ProcessGroup] = {
        ("tp",): mpu.get_tensor_model_parallel_group(),
        ("cp",): mpu.get_context_parallel_group(),
        ("dp",): mpu.get_data_parallel_group(),
        ("dp", "cp"): mpu.get_data_parallel_group(with_context_parallel=True),
        ("pp",): mpu.get_pipeline_model_parallel_group(),
        ("tp", "pp"): mpu.get_model_parallel_group(),
        ("tp", "cp"): mpu.get_tensor_and_context_parallel_group(),
        ("tp", "dp"): mpu.get_tensor_and_data_parallel_group(),
        ("tp", "dp", "cp"): mpu.get_tensor_and_data_parallel_group(with_context_parallel=True),
        ("etp",): mpu.get_expert_tensor_parallel_group(),
        ("ep",): mpu.get_expert_model_parallel_group(),
        ("edp",): mpu.get_expert_data_parallel_group(),
        ("etp", "ep"): mpu.get_expert_tensor_and_model_parallel_group(),
        ("etp", "ep", "pp"): mpu.get_expert_tensor_model_pipeline_parallel_group(),
    }
    wrong = [
        f"{' x '.join(axes)}: {dist.get_process_group_ranks(group)} in Megatron, "
        f"{list(grid.group_of(rank, *axes))} here"
        for axes, group in adopted.items()
        if tuple(dist.get_process_group_ranks(group)) != grid.group_of(rank, *axes)
    ]
    if wrong:
        raise ParallelConfigError(
            f"Megatron is initialised already, with other groups than {grid.config}.",
            "\n  ".join(wrong),
            "the sizes given here are those Megatron was initialised with.",
            "call destroy_model_parallel() first, or give Megatron's sizes",
        )
    return adopted


def destroy() -> None:
    """Megatron's destroy_model_parallel, which forgets its groups, then end those groups too."""
    from megatron.core import parallel_state as mpu

    groups = [group for group in mpu._global_process_group_list or [] if group is not None]
    mpu.destroy_model_parallel()
    end_groups(groups)


def check_megatron_accepts(
    grid: RankGrid, options: Mapping[str, Any], initialiser: Callable[..., None]
) -> None:
    """Refuse what Megatron's initialiser would assert on, with its arithmetic."""
    known = set(inspect.signature(initialiser).parameters) - _OURS - _OTHER_GRID
    for name in options:
        if name in _OURS or name in _OTHER_GRID:
            rule = "sizes and order come from ParallelConfig; it has no GTP and no rank offset."
            raise ParallelConfigError(f"megatron_options sets {name!r}.", rule=rule)
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.4)
            raise ParallelConfigError(
                f"megatron_options names {name!r}, which this Megatron does not know.",
                rule="megatron_options are keywords of Megatron's initialize_model_parallel.",
                nearest=", ".join(near or sorted(known)),
            )
    grid.check_pipelines_agree()
    axes, sizes = grid.config.axes, grid.sizes
    if axes[-1] != "pp" and sizes["pp"] > 1 and sizes["edp"] != sizes["dp"]:
        raise ParallelConfigError(
            f"order {grid.config.order!r} with pipeline_model_parallel_size={sizes['pp']}.",
            f"Dense layers have {sizes['dp']} data-parallel ranks, experts {sizes['edp']} "
            f"({grid.world_size} / ({sizes['etp']} x {sizes['ep']} x {sizes['pp']})).",
            "Megatron asks both to be equal unless the order ends in pp.",
            f"order={'-'.join([*(axis for axis in axes if axis != 'pp'), 'pp'])!r}",
        )
