"""Unmodified Megatron builds, trains and saves on CPU ranks, and the patches leave no trace."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from tests.megatron.small_gpt import Setting, Trainer, gpt_chunks, local_spec
from tests.support.pool import run_ranks
from ulysses_mc import megatron_on_cpu

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(torch.cuda.is_available(), reason="does nothing where CUDA is available"),
]
pytest.importorskip("megatron.core")


# -- the context ----------------------------------------------------------------------------


def everything_replaceable() -> dict[tuple[str, str], Any]:
    names = ("torch", "torch.cuda", "torch.cuda.random", "torch.nn.modules.module")
    modules = {name: module for name, module in sys.modules.items() if name in names}
    modules |= {
        name: module for name, module in sys.modules.items() if name.startswith("megatron.core")
    }
    found = {
        (module, name): value
        for module, loaded in modules.items()
        for name, value in vars(loaded).items()
    }
    for owner in (torch.Tensor, torch.nn.Module, torch.Generator):
        found |= {(owner.__name__, name): value for name, value in vars(owner).items()}
    return found


def assert_nothing_changed(before: dict[tuple[str, str], Any]) -> None:
    after = everything_replaceable()
    assert [key for key in before if after.get(key, "missing") is not before[key]] == []
    assert _get_current_function_mode_stack() == []
    assert logging.getLogger("megatron.core.tensor_parallel.random").filters == []


def test_every_attribute_is_put_back() -> None:
    with megatron_on_cpu():
        pass  # the modules that it looks at are loaded now
    before = everything_replaceable()
    with megatron_on_cpu():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        inside = everything_replaceable()
        with megatron_on_cpu():
            assert torch.zeros(1, device=0).cuda().pin_memory().device.type == "cpu"
        assert torch.zeros(1).to("cuda:0").device.type == "cpu"
        after_inner = everything_replaceable()
        assert [key for key in inside if after_inner[key] is not inside[key]] == []
    assert_nothing_changed(before)
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_an_exception_puts_everything_back() -> None:
    before = everything_replaceable()
    with pytest.raises(ZeroDivisionError), megatron_on_cpu():
        1 / 0  # noqa: B018
    assert_nothing_changed(before)


def test_does_nothing_where_cuda_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = everything_replaceable()
    with megatron_on_cpu():
        assert_nothing_changed(before)


def test_only_megatron_is_told_that_tensors_are_on_cuda() -> None:
    with megatron_on_cpu():
        assert torch.zeros(1).type() == "torch.FloatTensor"
        assert torch.zeros(1).type(torch.int64).dtype == torch.int64


def test_a_function_decorated_inside_is_compiled_when_it_is_called_outside() -> None:
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    with megatron_on_cpu():

        @torch.compile(backend=backend, fullgraph=True)
        def twice(x: torch.Tensor) -> torch.Tensor:
            """Doubles."""
            return 2 * x

        module = torch.compile(torch.nn.Linear(2, 2), backend=backend)
        assert (twice.__name__, twice.__doc__) == ("twice", "Doubles.")
        assert torch.equal(twice(torch.ones(2)), torch.full((2,), 2.0))
        assert module(torch.ones(2)).shape == (2,)
        assert compiled == []
    for _ in range(2):
        assert torch.equal(twice(torch.ones(2)), torch.full((2,), 2.0))
    assert len(compiled) == 1
    assert module(torch.ones(2)).shape == (2,)
    assert len(compiled) == 2


def test_the_start_does_not_load_the_compiler() -> None:
    code = (
        "import sys; from ulysses_mc import megatron_on_cpu\n"
        "with megatron_on_cpu():\n"
        "    from megatron.core.models.gpt import GPTModel\n"
        "print('torch._inductor.compile_fx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split()[-1:] == ["False"], done.stderr


# -- random states --------------------------------------------------------------------------


def forks() -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("megatron.core.tensor_parallel.random").addHandler(handler)
    with megatron_on_cpu():
        Setting().initialize()
        tracker = get_cuda_rng_tracker()
        tracker.add("one", 11)
        tracker.add("two", 12)
        state = torch.get_rng_state()
        alone = []
        for name in ("one", "one", "two", "two"):
            with tracker.fork(name):
                alone.append(torch.rand(4))
        assert torch.equal(torch.get_rng_state(), state)  # as if nothing had been drawn
        assert len({tuple(draw.tolist()) for draw in alone}) == 4
        for seed, draws in ((11, alone[:2]), (12, alone[2:])):
            generator = torch.Generator().manual_seed(seed)
            for draw in draws:
                assert torch.equal(draw, torch.rand(4, generator=generator))
    logging.getLogger("megatron.core.tensor_parallel.random").removeHandler(handler)
    assert records == []


def test_forked_states_are_independent_of_each_other_and_of_the_default() -> None:
    run_ranks(1, forks)


# -- training -------------------------------------------------------------------------------


def train(setting: Setting, steps: int) -> list[tuple[float, float]]:
    with megatron_on_cpu():
        setting.initialize()
        return Trainer(setting, gpt_chunks(setting)).train(steps)


def losses(world_size: int, setting: Setting, steps: int = 3) -> torch.Tensor:
    """[steps, 2]: loss and gradient norm, checked to be the same on every rank."""
    ranks = run_ranks(world_size, train, setting, steps, timeout=120)
    results = torch.tensor(ranks, dtype=torch.float64)
    assert torch.isfinite(results).all()
    torch.testing.assert_close(results, results[:1].expand_as(results), rtol=1e-6, atol=0)
    return results[0]


def assert_same(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


RECOMPUTE_FULL = dict(
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
)
DROPOUT = dict(attention_dropout=0.1, hidden_dropout=0.1)


@pytest.fixture(scope="module")
def one_rank() -> torch.Tensor:
    return losses(1, Setting())


def test_one_rank_learns(one_rank: torch.Tensor) -> None:
    assert one_rank[-1, 0] < one_rank[0, 0] - 0.1


@pytest.mark.parametrize(
    ("world_size", "setting"),
    [
        (2, Setting(tp=2)),
        (2, Setting(distributed_optimizer=True)),
        (1, Setting(config=RECOMPUTE_FULL)),
        (1, Setting(config=dict(recompute_granularity="selective"))),
    ],
    ids=["tp2", "dp2-distributed-optimizer", "recompute-full", "recompute-selective"],
)
def test_every_way_gives_the_same_losses(
    one_rank: torch.Tensor, world_size: int, setting: Setting
) -> None:
    assert_same(losses(world_size, setting), one_rank)


def test_pipelines_with_and_without_interleaving() -> None:
    plain = losses(4, Setting(tp=2, pp=2, distributed_optimizer=True))
    assert plain[-1, 0] < plain[0, 0] - 0.1
    interleaved = losses(4, Setting(tp=2, pp=2, vpp=2, tied=True))
    assert interleaved[-1, 0] < interleaved[0, 0] - 0.05


@pytest.mark.parametrize("recompute", [RECOMPUTE_FULL, dict(recompute_granularity="selective")])
def test_recomputation_repeats_the_dropout_masks(recompute: dict[str, Any]) -> None:
    plain = losses(2, Setting(tp=2, config=DROPOUT))
    assert_same(losses(2, Setting(tp=2, config=DROPOUT | recompute)), plain)
    assert not torch.equal(plain, losses(2, Setting(tp=2)))


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_bf16(distributed_optimizer: bool) -> None:
    setting = Setting(bf16=True, distributed_optimizer=distributed_optimizer)
    result = losses(2, setting, steps=4)
    assert result[-1, 0] < result[0, 0] - 0.05


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_mixture_of_experts(dispatcher: str) -> None:
    experts = dict(
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type=dispatcher,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_shared_expert_intermediate_size=32,
        add_bias_linear=False,
    )
    result = losses(2, Setting(ep=2, config=experts))
    assert result[-1, 0] < result[0, 0] - 0.05


# -- checkpoints ----------------------------------------------------------------------------


SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


def state_of(trainer: Trainer) -> dict[str, Any]:
    return {"model": trainer.model[0].module.sharded_state_dict()}


def save(setting: Setting, directory: str, spec: Any = local_spec) -> tuple[float, float]:
    """Trains a step, saves, and says how the next step goes."""
    from megatron.core import dist_checkpointing

    with megatron_on_cpu():
        setting.initialize()
        trainer = Trainer(setting, gpt_chunks(setting, spec))
        trainer.step(0)
        state = state_of(trainer)
        state["optimizer"] = trainer.optimizer.sharded_state_dict(state["model"], metadata=SHARDING)
        dist_checkpointing.save(state, directory)
        return trainer.step(1)


def load(setting: Setting, directory: str, spec: Any = local_spec) -> tuple[float, float]:
    from megatron.core import dist_checkpointing

    with megatron_on_cpu():
        setting.initialize()
        trainer = Trainer(setting, gpt_chunks(setting, spec))
        state = state_of(trainer)
        state["optimizer"] = trainer.optimizer.sharded_state_dict(
            state["model"], is_loading=True, metadata=SHARDING
        )
        state = dist_checkpointing.load(state, directory)
        trainer.model[0].module.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        return trainer.step(1)


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_a_checkpoint_resumes_at_another_size(tmp_path: Path, distributed_optimizer: bool) -> None:
    setting = Setting(tp=2, distributed_optimizer=distributed_optimizer)
    uninterrupted = run_ranks(2, save, setting, str(tmp_path), timeout=120)[0]
    setting = Setting(tp=1, distributed_optimizer=distributed_optimizer)
    resumed = run_ranks(1, load, setting, str(tmp_path), timeout=120)[0]
    assert resumed == pytest.approx(uninterrupted, rel=2e-5)
