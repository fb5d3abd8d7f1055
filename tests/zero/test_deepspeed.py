"""DeepSpeed ZeRO 1, 2 and 3 over data x Ulysses train as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.pool import run_ranks
from tests.zero.deepspeed_engine import deepspeed_engine
from tests.zero.models import llama
from tests.zero.training import (
    LAYOUTS,
    STEPS,
    Trace,
    assert_equal_everywhere,
    assert_same,
    losses,
    one_process,
    start,
    ulysses_llama,
)
from ulysses_mc import ParallelConfigError, deepspeed_gradient_divisor

pytest.importorskip("transformers")
pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.huggingface, pytest.mark.deepspeed]


def train(state: Any, engine: Any, model: Any) -> Trace:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    trace, divisor = Trace(), deepspeed_gradient_divisor(engine)
    for step in range(STEPS):
        total = 0.0
        for loss in losses(state, engine, step, divisor):
            engine.backward(loss)
            total += loss.item()
            if engine.is_gradient_accumulation_boundary():
                trace.gradients.append(
                    {n: safe_get_full_grad(p).clone() for n, p in model.named_parameters()}
                )
            engine.step()
        trace.losses.append(total)
        trace.norms.append(float(engine.get_global_grad_norm()))
    trace.weights = {n: safe_get_full_fp32_param(p).clone() for n, p in model.named_parameters()}
    return trace


def run_zero(dp: int, ulysses: int, stage: int, reduce_scatter: bool) -> None:
    state = start(dp, ulysses)
    model = ulysses_llama(state, torch.float32)
    zero = {"reduce_scatter": reduce_scatter}
    with deepspeed_engine(state, model, stage, zero_optimization=zero) as engine:
        trace = train(state, engine, model)
        assert_same(trace, one_process(), 2e-5)
        assert_equal_everywhere(trace.weights)


@pytest.mark.parametrize(("dp", "ulysses"), LAYOUTS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_equals_one_process(dp: int, ulysses: int, stage: int) -> None:
    run_ranks(4, run_zero, dp, ulysses, stage, True, timeout=90)


def test_zero3_without_reduce_scatter() -> None:
    run_ranks(4, run_zero, 2, 2, 3, False, timeout=90)


def run_plain(stage: int) -> None:
    """One rank: DeepSpeed adds nothing once its clipping is off (ZeRO 3 rounds otherwise)."""
    state = start(1, 1)
    model = llama(torch.float32)
    with deepspeed_engine(state, model, stage, gradient_accumulation_steps=1) as engine:
        trace = plain_losses(engine, lambda loss: (engine.backward(loss), engine.step()))
    model = llama(torch.float32)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)

    def step(loss: torch.Tensor) -> None:
        adam.zero_grad()
        loss.backward()
        adam.step()

    rounding = 0.0 if stage < 3 else 1e-6
    torch.testing.assert_close(trace, plain_losses(model, step), rtol=rounding, atol=0)


def plain_losses(model: Any, step: Any) -> list[float]:
    from tests.zero.models import tokens

    values = []
    for seed in range(4):
        loss = model(input_ids=tokens(2, 9, seed), use_cache=False).logits.square().mean()
        step(loss)
        values.append(loss.item())
    return values


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_rank_is_plain_adam(stage: int) -> None:
    run_ranks(1, run_plain, stage, timeout=90)


def run_bf16(dp: int, ulysses: int, stage: int) -> None:
    """bf16 weights, fp32 reduction: no further from the truth than one process in bf16."""
    from tests.zero.test_fsdp2 import error, train_bf16

    state = start(dp, ulysses)
    model = ulysses_llama(state, torch.bfloat16)
    options = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
    with deepspeed_engine(state, model, stage, **options) as engine:
        assert engine.communication_data_type == torch.float32
        trace = train(state, engine, model)
        mine, alone = error(trace), error(train_bf16(state))
        assert mine < 1.3 * alone, f"error {mine:.2e}; one process in bf16: {alone:.2e}"
        assert_equal_everywhere(trace.weights)


@pytest.mark.parametrize(("dp", "ulysses"), LAYOUTS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_weights_with_fp32_reduction(dp: int, ulysses: int, stage: int) -> None:
    run_ranks(4, run_bf16, dp, ulysses, stage, timeout=90)


def run_refused() -> None:
    state = start(1, 2)
    options = {"gradient_predivide_factor": 2.0}
    with (
        deepspeed_engine(state, ulysses_llama(state, torch.float32), 1, **options) as engine,
        pytest.raises(ParallelConfigError, match="gradient_predivide_factor"),
    ):
        deepspeed_gradient_divisor(engine)


def test_predivided_gradients_are_refused() -> None:
    run_ranks(2, run_refused, timeout=90)
