"""From a micro-batch that all ranks of a replica read to the tokens that this rank holds."""

from __future__ import annotations

from typing import Any

import torch

from ulysses_mc import SequenceLayout, shard_batch
from ulysses_mc.layers import packed_seq_params
from ulysses_mc.parallel_state import ParallelState


def local_part(
    batch: dict[str, torch.Tensor], state: ParallelState, device: torch.device
) -> tuple[dict[str, torch.Tensor], Any]:
    """This rank's tokens on its device, and what the model is told of documents (or None).

    Without documents [b, s] is cut in Megatron's token order. With `cu_seqlens` the samples stand
    in one row, [1, b x s], of which each rank holds a run.
    """
    ranks, rank = state.world_size("cp"), state.rank("cp")
    length = batch["tokens"].size(1)
    if "cu_seqlens" in batch:
        layout = SequenceLayout.contiguous(length, ranks)
        documents = packed_seq_params(batch["cu_seqlens"], layout, device=device)
    else:
        make = SequenceLayout.zigzag if ranks > 1 else SequenceLayout.contiguous
        layout, documents = make(length, ranks), None
    part = shard_batch(batch, layout, rank)
    return {k: v.to(device, non_blocking=True) for k, v in part.items()}, documents
