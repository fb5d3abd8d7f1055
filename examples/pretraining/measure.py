"""How fast a step was: what the log line says besides the loss."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .flops import flops_per_step, peak_tflops
from .log import Record

if TYPE_CHECKING:
    from .trainer import StepResult, Trainer


def measure(
    trainer: Trainer, result: StepResult, grad_norm: float, skipped: int, seconds: float
) -> Record:
    """The record of the step just done. Collective: the peak memory is the largest of all ranks.

    Args:
        seconds: per iteration, since the last record.
    Raises:
        RuntimeError: faster than the hardware can be, so that something was left out.
    """
    config, shape, device = trainer.config, trainer.shape, trainer.device
    memory = torch.tensor([peak_memory_gib(device)], dtype=torch.float64).to(device)
    dist.all_reduce(memory, op=dist.ReduceOp.MAX)
    world = dist.get_world_size()
    flops = flops_per_step(config, shape)
    tflops = None if flops is None else flops / seconds / world / 1e12
    peak = config.logging.peak_tflops_per_gpu
    if peak is None and device.type == "cuda":
        peak = peak_tflops(torch.cuda.get_device_name(device))
    mfu = tflops / peak if tflops is not None and peak else None
    if mfu is not None and mfu > 1:
        raise RuntimeError(
            f"{tflops:.0f} TFLOP/s per GPU is above the hardware's {peak:.0f}: not everything was "
            "computed (or logging.peak_tflops_per_gpu is too low)"
        )
    return Record(
        iteration=trainer.progress.iteration,
        consumed_samples=trainer.progress.consumed_samples,
        elapsed_ms=seconds * 1e3,
        tflops_per_gpu=tflops,
        learning_rate=trainer.optimizer.param_groups[0]["lr"],
        global_batch_size=shape.global_batch_size,
        lm_loss=result.loss,
        loss_scale=float(trainer.optimizer.get_loss_scale().item()),
        grad_norm=grad_norm,
        skipped_iterations=skipped,
        nan_iterations=0,  # a NaN stops the run
        tokens_per_second_per_gpu=shape.tokens_per_step / seconds / world,
        mfu=mfu,
        peak_memory_gib=float(memory.item()),
        eta_seconds=(trainer.train_iters - trainer.progress.iteration) * seconds,
    )


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory of this rank so far: of its GPU, or of its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
