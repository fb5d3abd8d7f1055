"""The methods that DeepSpeed calls on its `mpu` (read in its sources, 0.17 to 0.19)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.distributed as dist


class DeepSpeedNames(ABC):
    """DeepSpeed's names and DeepSpeed's meanings, for `deepspeed.initialize(mpu=state)`.

    | DeepSpeed says    | axes    | it uses them for                                   |
    |-------------------|---------|----------------------------------------------------|
    | sequence_parallel | cp      | dividing the average: loss is a mean over shards   |
    | sequence_data_... | dp x cp | ZeRO partitions, gradient reduction                |
    | data_parallel     | dp      | batch arithmetic, data loader (rank, world_size)   |
    | model_parallel    | tp x pp | overflow and gradient norm                         |

    One name lies: ZeRO-3 partitions a model's parameters over `get_data_parallel_group()` but
    keeps its optimizer states by the sequence-data group (0.19.8, parameter_offload.py). Both
    must be the same ranks, or dp 1 x sequence 2 trains to other weights. So this method, unlike
    the module-level getter of the same name and `get_data_parallel_world_size()`, is dp x cp.

    Stages 1 and 2 average gradients over dp and add them over cp. Stage 3 averages over both
    unless `"zero_optimization": {"reduce_scatter": false}` (0.19.8, coalesced_collectives.py
    forgets the sequence size): set that, or leave the division by cp out of the loss there.
    """

    @abstractmethod
    def group(self, *axes: str) -> dist.ProcessGroup: ...
    @abstractmethod
    def rank(self, *axes: str) -> int: ...
    @abstractmethod
    def world_size(self, *axes: str) -> int: ...
    @abstractmethod
    def ranks(self, *axes: str) -> tuple[int, ...]: ...

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        return self.group("cp")

    def get_sequence_parallel_rank(self) -> int:
        return self.rank("cp")

    def get_sequence_parallel_world_size(self) -> int:
        return self.world_size("cp")

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup:
        return self.group("dp", "cp")

    def get_sequence_data_parallel_rank(self) -> int:
        return self.rank("dp", "cp")

    def get_sequence_data_parallel_world_size(self) -> int:
        return self.world_size("dp", "cp")

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """dp x cp: see the class."""
        return self.group("dp", "cp")

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Global ranks of `get_data_parallel_group`."""
        return list(self.ranks("dp", "cp"))

    def get_data_parallel_rank(self) -> int:
        return self.rank("dp")

    def get_data_parallel_world_size(self) -> int:
        return self.world_size("dp")

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.group("tp", "pp")

    def get_model_parallel_rank(self) -> int:
        return self.rank("tp", "pp")

    def get_model_parallel_world_size(self) -> int:
        return self.world_size("tp", "pp")

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self.group("tp")

    def get_tensor_model_parallel_rank(self) -> int:
        return self.rank("tp")

    def get_tensor_model_parallel_world_size(self) -> int:
        return self.world_size("tp")

    def get_tensor_model_parallel_src_rank(self) -> int:
        return self.ranks("tp")[0]

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        return self.group("pp")

    def get_pipeline_model_parallel_rank(self) -> int:
        return self.rank("pp")

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self.world_size("pp")

    # The names of DeepSpeed's own pipeline topology for the same two.
    get_slice_parallel_group = get_tensor_model_parallel_group
    get_slice_parallel_rank = get_tensor_model_parallel_rank
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size
    get_pipe_parallel_group = get_pipeline_model_parallel_group
    get_pipe_parallel_rank = get_pipeline_model_parallel_rank
    get_pipe_parallel_world_size = get_pipeline_model_parallel_world_size
