"""DeepSpeed's ZeRO with the state as `mpu`: weights after three steps equal plain PyTorch's."""

import pytest
import torch

from tests.support.pool import run_ranks
from tests.zero.deepspeed_engine import deepspeed_left_clean
from ulysses_mc.parallel_state import ParallelConfig, initialize_model_parallel

pytest.importorskip("deepspeed")
STEPS, TOKENS, WIDTH = 3, 8, 16
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, 1)
    )


def samples():
    """[steps, samples, tokens, width]: two samples of eight tokens for each step."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(STEPS, 2, TOKENS, WIDTH, generator=generator)


def plain_weights():
    """One process, SGD on the mean over samples and tokens."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in samples():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def deepspeed_weights(stage, ulysses):
    with deepspeed_left_clean():
        return trained_weights(stage, ulysses)


def trained_weights(stage, ulysses):
    import deepspeed

    state = initialize_model_parallel(
        ParallelConfig(ulysses_parallel_size=ulysses), use_megatron=False
    )
    model = make_model()
    # With reduce_scatter stage 3 averages over the sequence ranks, where the others add.
    settings = {
        "train_micro_batch_size_per_gpu": 2 // state.world_size("dp"),
        "zero_optimization": {"stage": stage, "reduce_scatter": stage < 3},
        "zero_allow_untested_optimizer": True,
        "seq_parallel_communication_data_type": "fp32",
    }
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        config=settings,
        mpu=state,
    )
    for batch in samples():
        mine = batch.chunk(state.world_size("dp"))[state.rank("dp")]
        mine = mine.chunk(state.world_size("cp"), dim=1)[state.rank("cp")]
        # DeepSpeed adds over the sequence ranks and averages over dp: each its part of the mean.
        loss = engine(mine).square().mean() / state.world_size("cp")
        engine.backward(loss)
        engine.step()
    if stage < 3:
        return [parameter.detach().clone() for parameter in engine.module.parameters()]
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [parameter.detach().clone() for parameter in engine.module.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_equals_plain_pytorch(stage, ulysses):
    expected = plain_weights()
    for weights in run_ranks(2, deepspeed_weights, stage, ulysses, timeout=120, env=ENVIRONMENT):
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
