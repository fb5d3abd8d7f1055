"""A run as somebody wrote it down: a model, sizes, batch. What `explain` reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from .hardware import GPU, GPUS
from .job import Job, Setting
from .model import ModelShape
from .problems import Problem, whole_number
from .who_runs import OURS


@dataclass(frozen=True, kw_only=True)
class Run:
    """Sizes are what was written; `problems` is what is already known to be wrong with them.

    Args:
        world_size: ranks; 0: not said, one replica of the model is assumed.
        order: rank order, as in ParallelConfig.
        ends_count: the embedding and the loss count as a layer each when layers are divided over
            pipeline stages (Megatron's --account-for-embedding-in-pipeline-split and -loss-).
        unread: what was given and is not used here.
        runs_on: whose layers: this package's, or stock Megatron's.
        mamba: the stack holds Mamba layers.
        positions: Megatron's --max-position-embeddings; 0: not given, None: not needed.
        notes: what a person should know of how this was read.
    """

    source: str
    model: ModelShape
    seq_length: int
    micro_batch_size: int = 1
    global_batch_size: int = 1
    world_size: int = 0
    tp: int = 1
    ulysses: int = 1
    ring: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int | None = None
    order: str = "tp-ulysses-ring-ep-dp-pp"
    recompute: str = "none"
    precision: str = "bf16"
    zero_stage: int = 1
    tp_sequence_sharding: bool = False
    attention: str = "flash"
    kernels: str = "fused"
    offload_optimizer: bool = False
    ends_count: bool = False
    unread: tuple[str, ...] = ()
    runs_on: str = OURS
    mamba: bool = False
    positions: int | None = None
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = field(default=())

    @property
    def model_size(self) -> int:
        return self.tp * self.ulysses * self.ring * self.pp

    @property
    def ranks(self) -> int:
        return self.world_size or self.model_size * (self.dp or 1)

    @property
    def data_parallel_size(self) -> int:
        return max(self.ranks // self.model_size, 1)

    def size_problems(self) -> list[Problem]:
        """Sizes that are no whole numbers from 1 up."""
        names = ("seq_length", "micro_batch_size", "global_batch_size", "tp", "ulysses", "ring",
                 "pp", "vpp", "ep")  # fmt: skip
        return [p for name in names for p in whole_number(name, getattr(self, name))]

    def job(self, gpu: GPU | None = None) -> Job:
        """The run as the planner's job, on `gpu` (H100)."""
        return Job(
            model=self.model,
            gpu=gpu or GPUS["h100"],
            num_gpus=self.ranks,
            seq_length=self.seq_length,
            global_batch_size=self.global_batch_size,
            precision=self.precision,
            zero_stage=self.zero_stage,
            offload_optimizer=self.offload_optimizer,
            attention=self.attention,
            kernels=self.kernels,
            recompute=(self.recompute,),
            tp_sequence_sharding=self.tp_sequence_sharding,
        )

    def setting(self) -> Setting:
        return Setting(
            tp=self.tp,
            ulysses=self.ulysses,
            ring=self.ring,
            dp=self.data_parallel_size,
            pp=self.pp,
            vpp=self.vpp,
            ep=self.ep,
            micro_batch=self.micro_batch_size,
            recompute=self.recompute,
        )
