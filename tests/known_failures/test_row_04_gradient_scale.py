"""Row 4: gradients too big or small by the Ulysses size.

The same model and global batch at (dp, ulysses) = (4, 1), (2, 2), (1, 4), in two micro-batches
with unequal numbers of valid tokens, under every way to reduce gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support import oracle
from tests.support.pool import run_ranks
from ulysses_mc import (
    SequenceLayout,
    linear_cross_entropy,
    shard_batch,
    shift_labels,
    token_count,
    token_mean_loss,
)
from ulysses_mc.layers import UlyssesAttention

RANKS, MICRO_BATCHES, SAMPLES, S, H, D, VOCABULARY = 4, 2, 4, 13, 4, 3, 11
STEPS, LEARNING_RATE = 3, 0.5


class Model(nn.Module):
    """Embedding, one attention layer, output layer; returns its tokens' loss sum and count."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.attention = attention

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=draw, dtype=torch.float64))

        self.embedding = parameter(VOCABULARY, H * D)
        self.qkv = parameter(3 * H * D, H * D)
        self.output = parameter(VOCABULARY, H * D)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embedding[tokens]  # [b, s_r, h d]
        query, key, value = F.linear(hidden, self.qkv).unflatten(-1, (3, H, D)).unbind(2)
        hidden = hidden + self.attention(query, key, value, causal=True).flatten(2)
        return linear_cross_entropy(hidden, self.output, labels, chunk_size=8)


def global_batches(step: int) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(step)
    batches = []
    for index in range(MICRO_BATCHES):
        tokens = torch.randint(0, VOCABULARY, (SAMPLES, S), generator=draw)
        labels = shift_labels(tokens)
        # Few valid tokens in the first micro-batch, and none in some shards.
        labels[torch.rand(SAMPLES, S, generator=draw) < (0.9 if index == 0 else 0.2)] = -100
        labels[0, S // 2 :] = -100
        batches.append({"tokens": tokens, "labels": labels})
    return batches


def single_process() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of all steps, gradients of the first, weights after the last; nothing of ours but
    the model's own code: attention and loss are torch's."""
    model = Model(oracle.attention)
    losses, first = [], {}
    for step in range(STEPS):
        batches = global_batches(step)
        total = sum(int((b["labels"] != -100).sum()) for b in batches)
        value = 0.0
        for b in batches:
            hidden = model.embedding[b["tokens"]]
            qkv = F.linear(hidden, model.qkv).unflatten(-1, (3, H, D)).unbind(2)
            hidden = hidden + oracle.attention(*qkv, causal=True).flatten(2)
            logits = F.linear(hidden, model.output)
            loss = F.cross_entropy(logits.mT, b["labels"], reduction="sum") / total
            loss.backward()
            value += float(loss.detach())
        losses.append(value)
        first = first or {n: p.grad.clone() for n, p in model.named_parameters()}
        descend(model)
    return losses, first, {n: p.detach() for n, p in model.named_parameters()}


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LEARNING_RATE * parameter.grad
            parameter.grad = None


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(
    ulysses: int, engine: str, divisor: float | None
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    rank, data_parallel = dist.get_rank(), RANKS // ulysses
    groups = [
        dist.new_group(list(range(first, first + ulysses))) for first in range(0, RANKS, ulysses)
    ]
    layout = SequenceLayout.contiguous(S, ulysses)
    model: nn.Module = Model(UlyssesAttention(groups[rank // ulysses], layout))
    core = model
    if engine == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif engine == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))

    losses, first = [], {}
    for step in range(STEPS):
        batches = [
            shard_batch(
                {n: x[rank // ulysses :: data_parallel] for n, x in b.items()},
                layout,
                rank % ulysses,
            )
            for b in global_batches(step)
        ]
        count = sum((b["labels"] != -100).sum() for b in batches)
        total = token_count(count, dist.group.WORLD)
        value = 0.0
        for b in batches:
            loss = token_mean_loss(
                *model(b["tokens"], b["labels"]),
                dist.group.WORLD,
                total_count=total,
                gradient_divisor=divisor,
            )
            loss.backward()
            value += float(loss.detach())
        if engine == "manual":  # an engine that sums, then divides
            for parameter in core.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= divisor
        losses.append(value)
        first = first or {n: whole(p.grad) for n, p in core.named_parameters()}
        descend(core)
    return losses, first, {n: whole(p) for n, p in core.named_parameters()}


@pytest.fixture(scope="module")
def right() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    return single_process()


@pytest.mark.parametrize("ulysses", [1, 2, 4])
@pytest.mark.parametrize(
    ("engine", "divisor"),
    [
        ("manual", 1.0),  # sums, as Megatron does under calculate_per_token_loss
        ("manual", 2.0),  # divides by another number, as DeepSpeed by its data-parallel size
        ("ddp", None),
        ("fsdp2", None),
    ],
)
def test_gradients_are_those_of_one_process(right, ulysses, engine, divisor) -> None:
    results = run_ranks(RANKS, train, ulysses, engine, divisor, timeout=60)
    for losses, gradients, weights in results:
        assert losses == pytest.approx(right[0], rel=1e-10)
        for ours, theirs in ((gradients, right[1]), (weights, right[2])):
            for name, tensor in theirs.items():
                torch.testing.assert_close(
                    ours[name], tensor, rtol=1e-10, atol=1e-10 * float(tensor.abs().max())
                )
        for name, tensor in weights.items():
            assert torch.equal(tensor, results[0][2][name])  # bitwise on all peers


def test_a_wrong_divisor_is_off_by_the_ulysses_size(right) -> None:
    """The failure itself: what the tests above would see."""
    gradients = run_ranks(RANKS, train, 2, "ddp", 2.0, timeout=60)[0][1]
    for name, tensor in right[1].items():
        torch.testing.assert_close(gradients[name] * 2, tensor, rtol=1e-10, atol=1e-10)
