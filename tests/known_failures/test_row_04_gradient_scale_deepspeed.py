"""Row 4 under DeepSpeed's ZeRO, whose divisor differs by stage (see `token_mean_loss`)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.known_failures.test_row_04_gradient_scale import (
    MICRO_BATCHES,
    RANKS,
    SAMPLES,
    Model,
    S,
    global_batches,
    single_process,
)
from tests.support.pool import run_ranks
from tests.zero.deepspeed_engine import deepspeed_left_clean
from ulysses_mc import SequenceLayout, shard_batch, token_count, token_mean_loss
from ulysses_mc.layers import UlyssesAttention
from ulysses_mc.parallel_state import ParallelConfig, initialize_model_parallel

CPU = {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1", "DS_IGNORE_CUDA_DETECTION": "1"}


def one_step(ulysses: int, stage: int) -> tuple[float, dict[str, Tensor]]:
    with deepspeed_left_clean():
        return value_and_gradients(ulysses, stage)


def value_and_gradients(ulysses: int, stage: int) -> tuple[float, dict[str, Tensor]]:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    data_parallel = RANKS // ulysses
    state = initialize_model_parallel(
        ParallelConfig(ulysses_parallel_size=ulysses), use_megatron=False
    )
    layout, group = SequenceLayout.contiguous(S, ulysses), state.group("dp", "ulysses")
    model = Model(UlyssesAttention(state.group("ulysses"), layout)).float()
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // data_parallel,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, mpu=state, config=config)
    sequence, data = state.rank("ulysses"), state.rank("dp")
    batches = [
        shard_batch({n: x[data::data_parallel] for n, x in b.items()}, layout, sequence)
        for b in global_batches(0)
    ]
    total = token_count(sum((b["labels"] != -100).sum() for b in batches), group)
    # Stage 3 reduces with its default "reduce_scatter", and divides by all ranks, Ulysses too.
    divisor = (RANKS if stage == 3 else data_parallel) * MICRO_BATCHES
    value = 0.0
    for b in batches:
        sums = engine(b["tokens"], b["labels"])
        loss = token_mean_loss(*sums, group, total_count=total, gradient_divisor=divisor)
        value += float(loss.detach())
        engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            gradients = {n: safe_get_full_grad(p) for n, p in model.named_parameters()}
        engine.step()
    dist.barrier()
    return value, gradients


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ulysses", [1, 2, 4])
def test_gradients_are_those_of_one_process(ulysses: int, stage: int) -> None:
    pytest.importorskip("deepspeed")
    losses, right, _ = single_process()
    for value, gradients in run_ranks(RANKS, one_step, ulysses, stage, env=CPU, timeout=120):
        assert value == pytest.approx(losses[0], rel=1e-5)
        for name, tensor in right.items():
            tolerance = 2e-5 * float(tensor.abs().max())
            torch.testing.assert_close(gradients[name].double(), tensor, rtol=0, atol=tolerance)
