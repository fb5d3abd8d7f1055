"""Megatron's getters by name, with Megatron's meanings, reading the current ParallelState."""

from __future__ import annotations

import torch.distributed as dist

from .initialize import get_parallel_state


def _data_axes(with_context_parallel: bool) -> tuple[str, ...]:
    return ("dp", "cp") if with_context_parallel else ("dp",)


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """The data-parallel group; with context parallel, all ranks that hold the same weights."""
    return get_parallel_state().group(*_data_axes(with_context_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """This rank's place in that group."""
    return get_parallel_state().rank(*_data_axes(with_context_parallel))


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """Size of that group."""
    return get_parallel_state().world_size(*_data_axes(with_context_parallel))


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of its first member."""
    return get_parallel_state().ranks(*_data_axes(with_context_parallel))[0]


def get_model_parallel_group() -> dist.ProcessGroup:
    """The group that holds one copy of the weights, tp x pp."""
    return get_parallel_state().group("tp", "pp")


def get_model_parallel_src_rank() -> int:
    """Global rank of its first member."""
    return get_parallel_state().ranks("tp", "pp")[0]


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first member of the tensor-parallel group."""
    return get_parallel_state().ranks("tp")[0]


def get_context_parallel_global_ranks() -> list[int]:
    """Global ranks of the group that shares a sequence."""
    return list(get_parallel_state().ranks("cp"))


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Model chunks of a pipeline stage, or None without interleaving."""
    return get_parallel_state().config.virtual_pipeline_model_parallel_size


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of this pipeline's first stage."""
    return get_parallel_state().ranks("pp")[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of this pipeline's last stage."""
    return get_parallel_state().ranks("pp")[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage; the first follows the last."""
    state = get_parallel_state()
    return state.ranks("pp")[(state.rank("pp") + 1) % state.world_size("pp")]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the stage before; the last precedes the first."""
    state = get_parallel_state()
    return state.ranks("pp")[state.rank("pp") - 1]


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """The tensor-parallel group of this rank."""
    return get_parallel_state().group("tp")


def get_tensor_model_parallel_rank() -> int:
    """This rank's place in the tensor-parallel group."""
    return get_parallel_state().rank("tp")


def get_tensor_model_parallel_world_size() -> int:
    """Size of the tensor-parallel group."""
    return get_parallel_state().world_size("tp")


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    """The pipeline-parallel group of this rank."""
    return get_parallel_state().group("pp")


def get_pipeline_model_parallel_rank() -> int:
    """This rank's place in the pipeline-parallel group."""
    return get_parallel_state().rank("pp")


def get_pipeline_model_parallel_world_size() -> int:
    """Size of the pipeline-parallel group."""
    return get_parallel_state().world_size("pp")


def get_context_parallel_group() -> dist.ProcessGroup:
    """The group that shares a sequence, ulysses x ring of this rank."""
    return get_parallel_state().group("cp")


def get_context_parallel_rank() -> int:
    """This rank's place in the group that shares a sequence, ulysses x ring."""
    return get_parallel_state().rank("cp")


def get_context_parallel_world_size() -> int:
    """Size of the group that shares a sequence, ulysses x ring."""
    return get_parallel_state().world_size("cp")


def get_ulysses_parallel_group() -> dist.ProcessGroup:
    """The Ulysses group of this rank."""
    return get_parallel_state().group("ulysses")


def get_ulysses_parallel_rank() -> int:
    """This rank's place in the Ulysses group."""
    return get_parallel_state().rank("ulysses")


def get_ulysses_parallel_world_size() -> int:
    """Size of the Ulysses group."""
    return get_parallel_state().world_size("ulysses")


def get_ring_parallel_group() -> dist.ProcessGroup:
    """The ring group of this rank."""
    return get_parallel_state().group("ring")


def get_ring_parallel_rank() -> int:
    """This rank's place in the ring group."""
    return get_parallel_state().rank("ring")


def get_ring_parallel_world_size() -> int:
    """Size of the ring group."""
    return get_parallel_state().world_size("ring")


def get_expert_model_parallel_group() -> dist.ProcessGroup:
    """The expert-parallel group of this rank."""
    return get_parallel_state().group("ep")


def get_expert_model_parallel_rank() -> int:
    """This rank's place in the expert-parallel group."""
    return get_parallel_state().rank("ep")


def get_expert_model_parallel_world_size() -> int:
    """Size of the expert-parallel group."""
    return get_parallel_state().world_size("ep")


def get_expert_tensor_parallel_group() -> dist.ProcessGroup:
    """The expert-tensor-parallel group of this rank."""
    return get_parallel_state().group("etp")


def get_expert_tensor_parallel_rank() -> int:
    """This rank's place in the expert-tensor-parallel group."""
    return get_parallel_state().rank("etp")


def get_expert_tensor_parallel_world_size() -> int:
    """Size of the expert-tensor-parallel group."""
    return get_parallel_state().world_size("etp")


def get_expert_data_parallel_group() -> dist.ProcessGroup:
    """The expert-data-parallel group of this rank."""
    return get_parallel_state().group("edp")


def get_expert_data_parallel_rank() -> int:
    """This rank's place in the expert-data-parallel group."""
    return get_parallel_state().rank("edp")


def get_expert_data_parallel_world_size() -> int:
    """Size of the expert-data-parallel group."""
    return get_parallel_state().world_size("edp")
