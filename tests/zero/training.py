"""Three steps of training on one process, and this rank's part of the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tests.zero.models import llama, tokens
from ulysses_mc import (
    SequenceLayout,
    cross_entropy,
    shard_batch,
    shift_labels,
    token_count,
    token_mean_loss,
)
from ulysses_mc.layers import use_ulysses
from ulysses_mc.parallel_state import ParallelConfig, ParallelState, initialize_model_parallel

LAYOUTS = [(4, 1), (2, 2), (1, 4)]  # data parallel x Ulysses
STEPS, MICRO_BATCHES, ROWS, LENGTH = 3, 2, 4, 14  # rows of all data-parallel ranks together
LEARNING_RATE, EPS = 1e-2, 1e-4  # Adam divides by |gradient| + eps: rounding stays below it


@dataclass
class Trace:
    """What is compared: per step the loss, the gradients and their norm; the weights at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def batches(step: int) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of a step, whole; their valid tokens are few and unequal everywhere."""
    result = []
    for micro in range(MICRO_BATCHES):
        ids = tokens(ROWS, LENGTH, seed=100 * step + micro)
        labels = shift_labels(ids)
        labels[0, 3:] = -100
        labels[1, : 9 + micro] = -100
        labels[2] = -100
        if micro:
            labels[:, 10:] = -100  # the last Ulysses rank has no valid token here
        result.append({"tokens": ids, "labels": labels})
    return result


def optimizer(parameters: Any) -> torch.optim.Adam:
    return torch.optim.Adam(parameters, lr=LEARNING_RATE, eps=EPS)


def one_process(dtype: torch.dtype = torch.float64, *, steps: int = STEPS, **changes: Any) -> Trace:
    """Plain PyTorch on the whole batch: the right values."""
    model = llama(dtype, **changes)
    adam, trace = optimizer(model.parameters()), Trace()
    for step in range(steps):
        parts = [cross_entropy(model(b["tokens"]).logits, b["labels"]) for b in batches(step)]
        loss = sum(part for part, _ in parts) / sum(count for _, count in parts)
        adam.zero_grad()
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        trace.losses.append(loss.item())
        trace.gradients.append(gradients)
        trace.norms.append(torch.nn.utils.get_total_norm(gradients.values()).item())
        adam.step()
    trace.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return trace


def start(dp: int, ulysses: int) -> ParallelState:
    config = ParallelConfig(data_parallel_size=dp, ulysses_parallel_size=ulysses)
    return initialize_model_parallel(config, use_megatron=False)


def ulysses_llama(state: ParallelState, dtype: torch.dtype, **changes: Any) -> Any:
    """The same model on every rank, for its tokens; 14 tokens over 4 are 4, 4, 3, 3."""
    model = llama(dtype, **changes)
    layout = SequenceLayout.contiguous(LENGTH, state.world_size("ulysses"))
    use_ulysses(model, state.group("ulysses"), layout)
    return model


def losses(
    state: ParallelState, model: Any, step: int, gradient_divisor: float | None = None
) -> Iterator[torch.Tensor]:
    """One loss for each micro-batch; they add up to the mean over the whole batch."""
    layout = SequenceLayout.contiguous(LENGTH, state.world_size("ulysses"))
    everyone = state.group("dp", "ulysses")
    mine = [
        {
            name: tensor[state.rank("dp") :: state.world_size("dp")]
            for name, tensor in shard_batch(batch, layout, state.rank("ulysses")).items()
        }
        for batch in batches(step)
    ]
    count = sum((batch["labels"] != -100).sum() for batch in mine)
    total = token_count(count, everyone)
    for batch in mine:
        loss_sum, count = cross_entropy(model(input_ids=batch["tokens"]).logits, batch["labels"])
        yield token_mean_loss(
            loss_sum, count, everyone, total_count=total, gradient_divisor=gradient_divisor
        )


def assert_same(actual: Trace, expected: Trace, tolerance: float) -> None:
    """Each gradient and weight to `tolerance` of its largest element, losses and norms likewise."""
    for name in ("losses", "norms"):
        torch.testing.assert_close(
            torch.tensor(getattr(actual, name), dtype=torch.float64),
            torch.tensor(getattr(expected, name), dtype=torch.float64),
            rtol=tolerance,
            atol=0.0,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    pairs = [*zip(actual.gradients, expected.gradients, strict=True)]
    for step, (mine, theirs) in enumerate([*pairs, (actual.weights, expected.weights)]):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            worst = (mine[name].to(tensor.dtype) - tensor).abs().max() / tensor.abs().max()
            assert worst <= tolerance, f"{name}, step {step}: {worst:.2e} of its largest element"


def assert_equal_everywhere(tensors: dict[str, torch.Tensor]) -> None:
    """Bitwise the same on all ranks."""
    for name, tensor in tensors.items():
        everywhere = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, tensor.contiguous())
        assert all(tensor.equal(other) for other in everywhere), name
