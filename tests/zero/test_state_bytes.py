"""Bytes of weights, gradients and optimizer states that a rank holds, against the formulas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.support.pool import run_ranks
from tests.zero.deepspeed_engine import deepspeed_engine
from tests.zero.training import MICRO_BATCHES, losses, optimizer, start, ulysses_llama
from ulysses_mc import deepspeed_gradient_divisor

pytest.importorskip("transformers")
pytestmark = pytest.mark.huggingface

Bytes = dict[str, float]  # per parameter of the model
SHARDED = {(("dp", "ulysses"),): 4, ("dp", "ulysses"): 2}  # mesh -> ranks that share a weight


def held(tensors: Iterable[Any]) -> int:
    """Bytes of this rank's storages behind `tensors`, each once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if torch.is_tensor(t)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def adam_states(adam: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t for s in adam.state.values() for t in s.values() if t.dim()]  # without `step`


def run_fsdp(dims: Any) -> Bytes:
    state = start(2, 2)
    model = ulysses_llama(state, torch.float32)
    parameters = sum(p.numel() for p in model.parameters())
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=state.mesh(*dims))
    adam = optimizer(model.parameters())
    sum(losses(state, model, 0)).backward()
    adam.step()
    return {
        "weights": held(model.parameters()) / parameters,
        "gradients": held(p.grad for p in model.parameters()) / parameters,
        "optimizer": held(adam_states(adam)) / parameters,
    }


@pytest.mark.parametrize("dims", SHARDED, ids=str)
def test_fsdp2_fp32(dims: Any) -> None:
    """Weights 4, gradients 4, Adam 8, all over the ranks that share them."""
    ranks = SHARDED[dims]
    for measured in run_ranks(4, run_fsdp, dims, timeout=90):
        assert measured == pytest.approx(
            {"weights": 4 / ranks, "gradients": 4 / ranks, "optimizer": 8 / ranks}, rel=0.01
        )


def partitions(zero: Any) -> list[torch.Tensor]:
    """The averaged gradients that DeepSpeed keeps until its step."""
    flat = getattr(zero, "grad_partitions_flat_buffer", None)
    kept = [t for group in zero.averaged_gradients.values() for t in group or ()]
    return kept if flat is None else [*kept, flat]


def run_zero(stage: int) -> Bytes:
    state = start(2, 2)
    model = ulysses_llama(state, torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    options = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
    with deepspeed_engine(state, model, stage, **options) as engine:
        zero, gradients = engine.optimizer, 0
        for loss in losses(state, engine, 0, deepspeed_gradient_divisor(engine)):
            engine.backward(loss)
            gradients = held([*(p.grad for p in model.parameters()), *partitions(zero)])
            engine.step()
        whole = model.parameters() if stage < 3 else (p.ds_tensor for p in model.parameters())
        masters = [p for group in zero.optimizer.param_groups for p in group["params"]]
        if stage == 3:
            masters = zero.fp32_partitioned_groups_flat
        assert engine.micro_steps == MICRO_BATCHES
        return {
            "weights": held(whole) / parameters,
            "gradients": gradients / parameters,
            "optimizer": held([*masters, *adam_states(zero.optimizer)]) / parameters,
        }


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_bf16(stage: int) -> None:
    """Master weights 4 and Adam 8: 12 / 4 ranks; weights 2, shared by all ranks in stage 3.

    Averaged gradients before the step: 2 / 4, in stages 1 and 2 up to a quarter more on this small
    model.
    """
    pytest.importorskip("deepspeed")
    weights = 2 / 4 if stage == 3 else 2
    for measured in run_ranks(4, run_zero, stage, timeout=90):
        gradients = measured.pop("gradients")
        assert 0.5 * 0.99 < gradients < 0.5 * (1.01 if stage == 3 else 1.25)
        assert measured == pytest.approx({"weights": weights, "optimizer": 12 / 4}, rel=0.01)


def run_megatron(distributed_optimizer: bool) -> Bytes:
    """One step of tests.megatron's small GPT in bf16, on dp 2 x Ulysses 2."""
    from tests.megatron.small_gpt import Setting, Trainer, gpt_chunks, local_spec
    from ulysses_mc import megatron_on_cpu
    from ulysses_mc.layers import with_ulysses

    with megatron_on_cpu():
        setting = Setting(cp=2, bf16=True, distributed_optimizer=distributed_optimizer)
        setting.initialize()
        chunks = gpt_chunks(setting, lambda config: with_ulysses(local_spec(config)))
        trainer = Trainer(setting, chunks)
        trainer.forward_backward(0)
        trainer.optimizer.step()
        parameters = sum(p.numel() for p in chunks[0].parameters())
        inner = trainer.optimizer.chained_optimizers[0].optimizer
        masters = [p for group in inner.param_groups for p in group["params"]]
        return {
            "weights": held(chunks[0].parameters()) / parameters,
            "gradients": held(p.main_grad for p in chunks[0].parameters()) / parameters,
            "optimizer": held([*masters, *adam_states(inner)]) / parameters,
        }


@pytest.mark.megatron
@pytest.mark.parametrize("distributed_optimizer", [False, True], ids=["stage 0", "stage 1"])
def test_megatron_bf16(distributed_optimizer: bool) -> None:
    """Weights 2 and fp32 gradients 4 are whole; 12 is shared by dp x Ulysses ranks in stage 1."""
    shared = 4 if distributed_optimizer else 1
    for measured in run_ranks(4, run_megatron, distributed_optimizer, timeout=90):
        assert measured == pytest.approx(
            {"weights": 2.0, "gradients": 4.0, "optimizer": 12 / shared}, rel=0.01
        )
