"""What is asked for (Job), and one way to divide it over the GPUs (Setting)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ..head_layout import HeadLayout
from ..parallel_state import HeadDivisibilityError, ParallelConfig
from .hardware import GPU
from .model import ModelShape
from .problems import Problem, check, one_of, whole_number

RECOMPUTE = ("none", "selective", "full")
PRECISIONS = ("bf16", "fp8", "fp32")
ATTENTION = ("flash", "unfused")
KERNELS = ("fused", "plain")
# Past these nobody runs anything, and a search would not end.
MOST = {"gpus": 1 << 17, "seq_length": 1 << 33, "global_batch_size": 1 << 30}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run before it is divided.

    Args:
        num_gpus: ranks in total.
        seq_length: tokens of one sample. global_batch_size: samples of one step.
        precision: of matrix products. fp32: weights, activations and all else in 4 bytes.
        zero_stage: model states sharded over data x ulysses x ring: 0 none, 1 optimizer states
            (Megatron's distributed optimizer), 2 and gradients, 3 and parameters.
        gradient_bytes: per parameter; 0: 4 for stages 0 and 1 (Megatron), 2 for 2 and 3.
        master_weights: keep an fp32 copy of the parameters (12 bytes per parameter with Adam's
            two moments, else 8).
        offload_optimizer, offload_parameters: keep them in host memory.
        recompute: the choices allowed; the planner takes the cheapest that fits.
        offload_checkpoints: with full recompute, keep the layers' inputs in host memory.
        tiled_logits, tiled_mlp: compute them in pieces along the sequence.
        attention: 'flash' (nothing quadratic is kept) or 'unfused'.
        kernels: 'fused', as TransformerEngine's layers are, or 'plain', Megatron's local layers on
            PyTorch's own operators, which keep more for backward.
        tp_sequence_sharding: norms and residuals sharded over the tensor-parallel ranks
            (Megatron's --sequence-parallel).
        tp_overlap: tensor-parallel collectives in pieces behind the matrix products
            (Megatron's --tp-comm-overlap).
        uneven_heads: whether layouts with unequal runs of heads are allowed.
    """

    model: ModelShape
    gpu: GPU
    num_gpus: int
    seq_length: int
    global_batch_size: int
    precision: str = "bf16"
    zero_stage: int = 1
    gradient_bytes: int = 0
    master_weights: bool = True
    offload_optimizer: bool = False
    offload_parameters: bool = False
    recompute: tuple[str, ...] = RECOMPUTE
    offload_checkpoints: bool = False
    tiled_logits: bool = False
    tiled_mlp: bool = False
    attention: str = "flash"
    kernels: str = "fused"
    tp_sequence_sharding: bool = True
    tp_overlap: bool = False
    uneven_heads: bool = True

    def __hash__(self) -> int:
        """Of a few fields, as of a model."""
        return hash((self.num_gpus, self.seq_length, self.global_batch_size))

    def __post_init__(self) -> None:
        counts = {"gpus": self.num_gpus, "seq_length": self.seq_length,
                  "global_batch_size": self.global_batch_size}  # fmt: skip
        problems = [p for name, value in counts.items()
                    for p in whole_number(name, value, maximum=MOST[name])]  # fmt: skip
        problems += one_of("precision", self.precision, PRECISIONS)
        problems += one_of("zero_stage", self.zero_stage, (0, 1, 2, 3))
        problems += one_of("gradient_bytes", self.gradient_bytes, (0, 2, 4))
        problems += one_of("attention", self.attention, ATTENTION)
        problems += one_of("kernels", self.kernels, KERNELS)
        for choice in self.recompute:
            problems += one_of("recompute", choice, RECOMPUTE)
        if not self.recompute:
            problems.append(Problem("recompute names no choice", f"one of {', '.join(RECOMPUTE)}"))
        if self.precision == "fp8" and not self.gpu.peak_flops_fp8:
            problems.append(
                Problem(f"precision fp8 on {self.gpu.name}", "a GPU with fp8", "h100; bf16")
            )
        limit = self.model.learned_positions
        if isinstance(self.seq_length, int) and limit and self.seq_length > limit:
            problems.append(
                Problem(
                    f"seq_length {self.seq_length} of {self.model.name}",
                    f"at most its {limit} learned positions",
                    f"seq_length {limit}; or --positions {self.seq_length} to enlarge the table",
                )
            )
        check(problems)

    @property
    def element_size(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def state_bytes(self) -> tuple[int, int, int]:
        """Bytes per parameter: parameters, gradients, optimizer."""
        weight = self.element_size
        gradient = self.gradient_bytes or (4 if self.zero_stage < 2 else 2)
        # In fp32 the weights are their own master copy.
        return weight, gradient, 12 if self.master_weights and weight == 2 else 8

    @property
    def tokens_per_step(self) -> int:
        return self.seq_length * self.global_batch_size


@dataclass(frozen=True)
class Setting:
    """One division of a job. ep lies on the same ranks as tp x ulysses x ring x dp."""

    tp: int = 1
    ulysses: int = 1
    ring: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    micro_batch: int = 1
    recompute: str = "none"

    @property
    def cp(self) -> int:
        """Ranks that share a sequence: Megatron's context-parallel size."""
        return self.ulysses * self.ring

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def num_micro_batches(self, global_batch_size: int) -> int:
        return global_batch_size // (self.micro_batch * self.dp)

    def with_recompute(self, choice: str) -> Setting:
        return replace(self, recompute=choice)

    def parallel_config(self) -> ParallelConfig:
        return ParallelConfig(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            ulysses_parallel_size=self.ulysses,
            ring_parallel_size=self.ring,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=1 if self.ep > 1 else None,
            virtual_pipeline_model_parallel_size=self.vpp if self.vpp > 1 else None,
        )

    def label(self) -> str:
        """tp8 ulysses4 dp2: the sizes above 1."""
        sizes = {"tp": self.tp, "ulysses": self.ulysses, "ring": self.ring, "pp": self.pp,
                 "vpp": self.vpp, "ep": self.ep, "dp": self.dp}  # fmt: skip
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "1 GPU"


@lru_cache(maxsize=4096)
def head_layout(model: ModelShape, tp: int, ulysses: int) -> HeadLayout | HeadDivisibilityError:
    """The heads of a tensor-parallel rank over the Ulysses ranks, or why there are none."""
    try:
        return HeadLayout(model.num_attention_heads, model.num_query_groups, ulysses, tp)
    except HeadDivisibilityError as error:
        return error
