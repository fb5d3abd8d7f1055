"""Dropout under Ulysses: which ranks' masks are equal and which differ.

Megatron gives all context-parallel ranks the same random states. Tokens at the same place of
two ranks' shards would then be dropped alike, and so would the attention weights of two ranks'
heads. Here the draws of hidden and of attention dropout differ between Ulysses ranks; between
tensor-parallel ranks they are equal or differ as Megatron has it. The states that Megatron keeps
(in its tracker, in checkpoints, around recomputation) stay equal between Ulysses ranks: a rank's
own stream follows from them and from its rank, so nothing further has to be saved, and
draws outside dropout (per sample, at initialisation) agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import random as megatron_random

from ..parallel_state.errors import ParallelConfigError
from .random import rank_distinct_rng


def bias_dropout_add(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
    """Megatron's `get_bias_dropout_add`, with masks that differ between Ulysses ranks."""
    add = get_bias_dropout_add(training, fused)

    def distinct_add(x_with_bias: Any, residual: torch.Tensor, prob: float) -> torch.Tensor:
        with _hidden_rng(residual.device) if training and prob else nullcontext():
            out: torch.Tensor = add(x_with_bias, residual, prob)
            return out

    return distinct_add


class ShardDropout(torch.nn.Dropout):
    """Dropout on this rank's tokens, with masks that differ between Ulysses ranks."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with _hidden_rng(input.device) if self.training and self.p else nullcontext():
            return super().forward(input)


def wire_dropout(model: torch.nn.Module) -> None:
    """Makes the dropout after the embedding, which no layer spec names, differ between ranks."""
    for module in list(model.modules()):
        dropout = getattr(module, "embedding_dropout", None)
        if isinstance(dropout, torch.nn.Dropout) and not isinstance(dropout, ShardDropout):
            module.embedding_dropout = ShardDropout(dropout.p)


def _hidden_rng(device: torch.device) -> Any:
    # Layer specs build this without a group, so it is Megatron's.
    if parallel_state.get_context_parallel_world_size() == 1:
        return nullcontext()
    return rank_distinct_rng(parallel_state.get_context_parallel_rank(), device)


@contextmanager
def attention_dropout_rng(
    group: dist.ProcessGroup, device: torch.device, sequence_parallel: bool
) -> Iterator[None]:
    """Draws inside differ between the heads of all tensor-parallel and Ulysses ranks.

    Also those of a core attention that forks the tracker's model-parallel state itself.
    """
    if sequence_parallel:  # the transformer block has forked that state around all its layers
        with rank_distinct_rng(group.rank(), device):
            yield
        return
    tracker = megatron_random.get_cuda_rng_tracker()
    if megatron_random.is_graph_safe_cuda_rng_tracker(tracker):
        raise ParallelConfigError(
            f"attention_dropout with a CUDA-graph-safe random tracker and a Ulysses group of "
            f"{group.size()} ranks.",
            rule="each rank's stream is derived when a layer runs, which a graph cannot repeat",
            nearest="attention_dropout 0, or no use_cudagraphable_rng.",
        )
    name = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME
    with tracker.fork(name), rank_distinct_rng(group.rank(), device):
        states = tracker.get_states()
        states[name] = megatron_random._get_cuda_rng_state()
        tracker.set_states(states)
        yield
