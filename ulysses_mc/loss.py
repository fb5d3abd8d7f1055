"""The token-weighted loss: sum of losses over count of tokens, of all micro-batches and ranks.

A rank's own mean is wrong as soon as ranks hold unequal numbers of valid tokens. So every rank
gives a sum and a count, and only the totals are divided. Tokens that do not count are left out
*before* their logits are computed: 0 x NaN is NaN, in the backward pass too.

    loss_sum, count = linear_cross_entropy(hidden, weight, labels)     # this rank's tokens
    loss = token_mean_loss(loss_sum, count, state.group("dp", "ulysses"))
    loss.backward()
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .batch_checks import check_count
from .parallel_state.errors import ParallelConfigError

IGNORE_INDEX = -100


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the valid tokens' cross entropy, and their count (or weight).

    A token is valid if its label is not -100 and its weight is not 0. Others have no influence:
    their logits may be NaN, and get a gradient of exactly 0. (A NaN that came out of an output
    layer still poisons that layer: then use `linear_cross_entropy`.)

    Args:
        logits: [.., vocabulary].
        labels: [..], shifted; integers.
        weights: [..], or None for 1.

    Returns:
        Two scalars, float32 (float64 for float64 logits); 0 and 0 without a valid token.

    Raises:
        ParallelConfigError: labels or weights of another shape than [..], or labels that are no
            integers, as probabilities are.
    """
    valid, labels, weights = _valid("logits", logits, labels, weights)
    return _weighted_sum(logits[valid], labels, weights), _count(labels, weights)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    chunk_size: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cross_entropy` of an output layer's logits, which never exist all at once.

    Only valid tokens go through the output layer, `chunk_size` at a time, and again in the
    backward pass; peak memory is about 2 x chunk_size x vocabulary x 4 bytes, at any sequence
    length. Ranks without a valid token take part with zeros, in the backward pass too, as the
    other ranks' collectives need them to.

    Args:
        hidden: [.., d], the input of the output layer.
        weight: [vocabulary, d], not split over ranks (Megatron has its own vocabulary-parallel
            cross entropy).
        labels, weights: [..], see `cross_entropy`.
        bias: [vocabulary].
        chunk_size: tokens.

    Returns:
        Two scalars: sum and count.

    Raises:
        ParallelConfigError: as `cross_entropy`; or a chunk size below 1.
    """
    check_count("chunk_size", chunk_size, "tokens")
    valid, labels, weights = _valid("hidden", hidden, labels, weights)
    hidden = hidden[valid]  # [valid tokens, d]

    def chunk_sum(h: torch.Tensor, y: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
        return _weighted_sum(F.linear(h, weight, bias), y, w)

    total: torch.Tensor | None = None
    for start in range(0, max(1, len(labels)), chunk_size):  # at least one, maybe empty
        part = slice(start, start + chunk_size)
        part_weights = None if weights is None else weights[part]
        loss = checkpoint(
            chunk_sum,
            hidden[part],
            labels[part],
            part_weights,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        total = loss if total is None else total + loss
    assert total is not None
    return total, _count(labels, weights)


def masked_sum(losses: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum and count of per-token losses by selection: what weighs 0 is not even read.

    Args:
        losses, weights: [..] alike.

    Raises:
        ParallelConfigError: the shapes differ.
    """
    _check_shape("weights", weights, "losses", losses, losses.shape)
    valid = weights != 0
    weights = weights[valid].to(_accumulation_dtype(losses))
    return (losses[valid] * weights).sum(), weights.sum()


def token_count(count: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The count over all ranks of `group`: for `token_mean_loss(total_count=...)`.

    Args:
        count: scalar, this rank's count over all its micro-batches.
        group: data-parallel x Ulysses.
    """
    total = count.detach().to(torch.float64)
    dist.all_reduce(total, group=group)
    return total


def token_mean_loss(
    loss_sum: torch.Tensor,
    count: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    total_count: torch.Tensor | None = None,
    gradient_divisor: float | None = None,
) -> torch.Tensor:
    """Sum over count of all ranks, equal on all of them; differentiable.

    | pass     | this rank                    | collective                                |
    |----------|------------------------------|-------------------------------------------|
    | forward  | loss_sum [], count [] -> []  | one all-reduce of two numbers             |
    | backward | [] -> [] x gradient_divisor / total count | none                          |

    Gradient scale: what *sums* over the ranks of `group` to the gradient of the returned value,
    times `gradient_divisor`, which is what the training engine divides summed gradients by:

    * DDP, FSDP2 over the ranks of `group`: their number (None means that).
    * DeepSpeed given its sequence-parallel groups (`mpu`): ZeRO 1 and 2 divide by the
      data-parallel size alone (group size / ulysses size), ZeRO 3 with its default
      `reduce_scatter: true` by the size of `group`, with false as ZeRO 1 does. Multiply by the
      gradient accumulation steps, by which `engine.backward` divides too. (Seen with 0.19.8.)
    * Gradients that are summed (all-reduce SUM, FSDP2 with `set_gradient_divide_factor(1)`): 1.
    * Megatron divides by itself: use `megatron_token_loss`.

    Several micro-batches: give each the `total_count` of all of them (`token_count`), and
    accumulate gradients without any further division. The values then add up to the mean.

    Args:
        loss_sum, count: scalars of this rank and micro-batch.
        group: data-parallel x Ulysses, e.g. `state.group("dp", "ulysses")`.
        total_count: over all micro-batches and ranks.
        gradient_divisor: see above.

    Returns:
        Scalar; 0, with zero gradients, where nothing counts at all.
    """
    divisor = float(group.size() if gradient_divisor is None else gradient_divisor)
    return _TokenMean.apply(loss_sum, count, group, total_count, divisor)  # type: ignore[no-any-return,no-untyped-call]


def megatron_token_loss(
    token_losses: torch.Tensor, loss_mask: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """What a Megatron loss function returns under `calculate_per_token_loss=True`.

    Megatron sums the first over micro-batches and ranks (its DDP then does not average) and
    divides gradients by the sum of the second, over micro-batches and data-parallel x
    context-parallel ranks. Source: megatron.core.distributed.finalize_model_grads.

    Masked tokens are left out of the sum, but their logits have been computed: NaN among them
    stops Megatron, as NaN anywhere does.

    Args:
        token_losses: [b, s_r], from the model.
        loss_mask: [b, s_r], 0 or 1 (Megatron counts in integers).
        group: data-parallel with context-parallel, e.g. `state.group("dp", "ulysses")`.

    Returns:
        Sum and count (int32) of this rank, and {"lm loss": [sum, count] over `group`}, so that a
        log divides sums by counts.
    """
    total, count = masked_sum(token_losses.float(), loss_mask)
    report = torch.stack([total.detach(), count])
    dist.all_reduce(report, group=group)
    return total, count.to(torch.int), {"lm loss": report}


class _TokenMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        loss_sum: torch.Tensor,
        count: torch.Tensor,
        group: dist.ProcessGroup,
        total_count: torch.Tensor | None,
        divisor: float,
    ) -> torch.Tensor:
        # float64: a float32 count is exact to 2**24 tokens only, and ranks must agree
        totals = torch.stack([loss_sum.double(), count.double()])
        dist.all_reduce(totals, group=group)
        total, counted = totals[0], totals[1] if total_count is None else total_count.double()
        counted = torch.where(counted == 0, torch.ones_like(counted), counted)
        ctx.scale = divisor / counted
        return (total / counted).to(loss_sum.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return (grad.double() * ctx.scale).to(grad.dtype), None, None, None, None


def _valid(
    name: str, per_token: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Which tokens count [..], and the labels and weights of those alone [valid tokens].

    Args:
        per_token: [.., d], the logits or hidden states of that name.
    """
    tokens = per_token.shape[:-1]
    dtype = labels.dtype
    if dtype == torch.bool or dtype.is_floating_point or dtype.is_complex:
        raise ParallelConfigError(
            f"labels of shape {list(labels.shape)} and dtype {dtype}.",
            rule="a label is the id of one token, an integer; probabilities over the vocabulary "
            "are no labels here",
            nearest=f"labels of int64 and shape {list(tokens)}; for a distribution a loss per "
            "token of your own, and its sum and count to token_mean_loss.",
        )
    _check_shape("labels", labels, name, per_token, tokens)
    if weights is not None:
        _check_shape("weights", weights, name, per_token, tokens)
    labels = labels.long()
    valid = labels != IGNORE_INDEX
    if weights is not None:
        valid = valid & (weights != 0)
    return valid, labels[valid], None if weights is None else weights[valid]


def _check_shape(
    name: str, tensor: torch.Tensor, of: str, per_token: torch.Tensor, tokens: torch.Size
) -> None:
    """Refuses a tensor that is not one number for each token of `per_token`."""
    if tensor.shape != tokens:
        raise ParallelConfigError(
            f"{name} of shape {list(tensor.shape)} for {of} of shape {list(per_token.shape)}.",
            f"{of} has {list(tokens)} tokens.",
            f"{name} holds one number for each token, in the same order",
            f"{name} of shape {list(tokens)}, cut like the tokens (shard_batch).",
        )


def _weighted_sum(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    logits = logits.to(_accumulation_dtype(logits))
    if weights is None:
        return F.cross_entropy(logits, labels, reduction="sum")
    return (F.cross_entropy(logits, labels, reduction="none") * weights.to(logits.dtype)).sum()


def _count(labels: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    if weights is None:
        return torch.tensor(labels.numel(), dtype=torch.float64, device=labels.device)
    return weights.detach().double().sum()


def _accumulation_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
