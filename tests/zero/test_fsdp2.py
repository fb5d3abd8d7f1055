"""FSDP2, HSDP and DDP over data x Ulysses train as one process does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.pool import run_ranks
from tests.zero.models import llama
from tests.zero.training import (
    LAYOUTS,
    MICRO_BATCHES,
    STEPS,
    Trace,
    assert_equal_everywhere,
    assert_same,
    batches,
    losses,
    one_process,
    optimizer,
    start,
    ulysses_llama,
)
from ulysses_mc import average_replicated_gradients, cross_entropy, gradient_norm

pytest.importorskip("transformers")
pytestmark = pytest.mark.huggingface

FLAT, HYBRID, HYBRID_OTHER = (("dp", "ulysses"),), ("dp", "ulysses"), ("ulysses", "dp")


def shard(model: Any, mesh: Any, **options: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def train(state: Any, model: Any, replicated: bool = False) -> Trace:
    adam, trace = optimizer(model.parameters()), Trace()
    for step in range(STEPS):
        adam.zero_grad()
        total = 0.0
        for loss in losses(state, model, step):
            loss.backward()
            total += loss.item()
        if replicated:
            average_replicated_gradients(model.parameters(), state.group("dp", "ulysses"))
        trace.losses.append(total)
        trace.norms.append(gradient_norm(model.parameters()).item())
        trace.gradients.append({n: full(p.grad) for n, p in model.named_parameters()})
        adam.step()
    trace.weights = {n: full(p) for n, p in model.named_parameters()}
    return trace


def run_fsdp(dp: int, ulysses: int, mesh: Any, reshard: bool, replicated: bool = False) -> None:
    state = start(dp, ulysses)
    model = ulysses_llama(state, torch.float64)
    options: dict[str, Any] = {"reshard_after_forward": reshard}
    if replicated:
        options["ignored_params"] = {model.model.norm.weight}
    shard(model, state.mesh(*mesh), **options)
    assert isinstance(model.model.norm.weight, DTensor) != replicated
    trace = train(state, model, replicated)
    assert_same(trace, one_process(), 1e-10)
    assert_equal_everywhere(trace.weights)
    if not replicated:
        torch_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.testing.assert_close(gradient_norm(model.parameters()), torch_norm.full_tensor())


@pytest.mark.parametrize(("dp", "ulysses"), LAYOUTS)
@pytest.mark.parametrize("reshard", [False, True], ids=["zero2", "zero3"])
def test_fsdp2_over_both(dp: int, ulysses: int, reshard: bool) -> None:
    run_ranks(4, run_fsdp, dp, ulysses, FLAT, reshard)


@pytest.mark.parametrize("mesh", [HYBRID, HYBRID_OTHER], ids="x".join)
def test_hsdp(mesh: Any) -> None:
    run_ranks(4, run_fsdp, 2, 2, mesh, True)


@pytest.mark.parametrize(("dp", "ulysses"), LAYOUTS)
def test_fsdp2_with_a_replicated_parameter(dp: int, ulysses: int) -> None:
    run_ranks(4, run_fsdp, dp, ulysses, FLAT, True, replicated=True)


def run_ddp(dp: int, ulysses: int) -> None:
    state = start(dp, ulysses)
    model = ulysses_llama(state, torch.float64)
    wrapped = DistributedDataParallel(model, process_group=state.group("dp", "ulysses"))
    trace = train(state, Unprefixed(wrapped))
    assert_same(trace, one_process(), 1e-10)
    assert_equal_everywhere(trace.weights)


class Unprefixed:
    """DDP under its model's parameter names."""

    def __init__(self, wrapped: Any) -> None:
        self.parameters = wrapped.module.parameters
        self.named_parameters = wrapped.module.named_parameters
        self.wrapped = wrapped

    def __call__(self, **inputs: Any) -> Any:
        return self.wrapped(**inputs)


@pytest.mark.parametrize(("dp", "ulysses"), LAYOUTS)
def test_ddp(dp: int, ulysses: int) -> None:
    run_ranks(4, run_ddp, dp, ulysses)


def run_plain() -> None:
    """On one rank the model with Ulysses is the model without."""
    state = start(1, 1)
    trace = train(state, ulysses_llama(state, torch.float32))
    plain = train(state, llama(torch.float32))
    assert_same(trace, plain, 0.0)
    assert_same(plain, one_process(torch.float32), 2e-5)


def test_one_rank_is_plain_bitwise() -> None:
    run_ranks(1, run_plain)


class ReduceScatters(TorchDispatchMode):
    """The dtypes and elements of all reduce-scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "reduce_scatter" in func._schema.name:
            given = next(a for a in args[1:] if isinstance(a, torch.Tensor))
            self.elements[given.dtype] += given.numel()
        return func(*args, **(kwargs or {}))


def run_bf16(dp: int, ulysses: int) -> None:
    """bf16 weights in the layers; gradients reduced, accumulated and applied in fp32."""
    state = start(dp, ulysses)
    model = ulysses_llama(state, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, state.mesh(*FLAT), mp_policy=policy)
    with ReduceScatters() as reduced:
        trace = train(state, model)
    assert set(reduced.elements) == {torch.float32}
    assert reduced.elements.total() >= STEPS * MICRO_BATCHES * sum(
        p.numel() for p in llama().parameters()
    )
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    mine = error(trace)
    alone = error(train_bf16(state))
    assert mine < 1.3 * alone, f"gradient error {mine:.2e}; one process in bf16: {alone:.2e}"
    assert_equal_everywhere(trace.weights)


def train_bf16(state: Any) -> Trace:
    """The whole batch on each rank by itself, bf16 weights, gradients summed in fp32."""
    model, trace = llama(torch.bfloat16), Trace()
    sums = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in model.named_parameters()}
    parts = batches(0)
    count = sum((batch["labels"] != -100).sum() for batch in parts)
    for batch in parts:
        model.zero_grad()
        (cross_entropy(model(batch["tokens"]).logits, batch["labels"])[0] / count).backward()
        for name, weight in model.named_parameters():
            sums[name] += weight.grad.float()
    trace.gradients.append(sums)
    return trace


def error(trace: Trace) -> float:
    """Of the first step's gradients, all of them together, relative."""
    exact = one_process(steps=1).gradients[0]
    wrong = sum((trace.gradients[0][n].double() - g).square().sum() for n, g in exact.items())
    return float((wrong / sum(g.square().sum() for g in exact.values())).sqrt())


@pytest.mark.parametrize(("dp", "ulysses"), LAYOUTS)
def test_bf16_weights_with_fp32_reduction(dp: int, ulysses: int) -> None:
    run_ranks(4, run_bf16, dp, ulysses)
