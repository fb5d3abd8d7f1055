"""The small GPT on packed documents, micro-batches of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron.gathering import Step, comparable, set_weights, steps_of
from tests.megatron.small_gpt import VOCABULARY, Setting, Trainer, gpt_chunks, local_spec
from tests.megatron.stock import stock_spec
from ulysses_mc import SequenceLayout, megatron_on_cpu, pad_documents, shard_batch, shift_labels

# Of four micro-batches: one token alone, one document alone, neighbours of equal length.
DOCUMENTS = ((5, 1, 9, 3), (16,), (1, 4, 4, 2), (13, 4))


def boundaries(lengths: tuple[int, ...]) -> list[int]:
    return [0, *accumulate(lengths)]


def whole_batch(number: int, step: int) -> dict[str, torch.Tensor]:
    """Micro-batch `number` before it is padded or cut: [1, t] each."""
    cu = boundaries(DOCUMENTS[number])
    generator = torch.Generator().manual_seed(100 * step + number)
    tokens = torch.randint(1, VOCABULARY, (1, cu[-1]), generator=generator)
    labels = shift_labels(tokens, cu_seqlens=cu)
    return {
        "tokens": tokens,
        "labels": labels.clamp_min(0),
        "loss_mask": (labels >= 0).float(),
        "cu_seqlens": torch.tensor(cu, dtype=torch.int32),
    }


def block_diagonal(cu: list[int]) -> torch.Tensor:
    """[1, 1, t, t], True = masked out: the future and other documents."""
    hidden = torch.ones(cu[-1], cu[-1], dtype=torch.bool)
    for a, b in pairwise(cu):
        hidden[a:b, a:b] = torch.ones(b - a, b - a, dtype=torch.bool).triu(1)
    return hidden[None, None]


def unpacked(batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(batch, arguments of the model) as one ordinary sequence under a mask, on one rank."""
    cu = batch["cu_seqlens"].tolist()
    positions = [i - a for a, b in pairwise(cu) for i in range(a, b)]
    batch = batch | {"position_ids": torch.tensor(positions)[None]}
    return batch, {"attention_mask": block_diagonal(cu)}


def in_megatrons_order(batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every document padded and cut into 2P chunks, in Megatron's own PackedSeqParams."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    size, rank, tensor = _sizes()
    batch = pad_documents(batch, size * lcm(2, tensor))
    padded = batch["cu_seqlens_padded"]
    layout = SequenceLayout.zigzag_packed(padded.tolist(), size)
    longest = int((padded[1:] - padded[:-1]).max())
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch["cu_seqlens"],
        cu_seqlens_kv=batch["cu_seqlens"],
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    assert parallel_state.get_context_parallel_rank() == rank
    return shard_batch(batch, layout, rank), {"packed_seq_params": params}


def zigzag(batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same by `packed_seq_params`."""
    from ulysses_mc.layers import packed_seq_params

    size, rank, tensor = _sizes()
    batch = pad_documents(batch, size * lcm(2, tensor))
    layout = SequenceLayout.zigzag_packed(batch["cu_seqlens_padded"].tolist(), size)
    params = packed_seq_params(
        batch["cu_seqlens"], layout, cu_seqlens_padded=batch["cu_seqlens_padded"]
    )
    assert params.is_megatrons_order
    return shard_batch(batch, layout, rank), {"packed_seq_params": params}


def contiguous(batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Without padding, runs of tokens whose lengths may differ by one."""
    from ulysses_mc.layers import packed_seq_params

    size, rank, _ = _sizes()
    layout = SequenceLayout.contiguous(batch["tokens"].size(1), size)
    params = packed_seq_params(batch["cu_seqlens"], layout)
    return shard_batch(batch, layout, rank), {"packed_seq_params": params}


def _sizes() -> tuple[int, int, int]:
    from megatron.core import parallel_state

    return (
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


Arrange = Callable[[dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]


def reader(arrange: Arrange) -> Callable[[Setting, int], Iterator[Any]]:
    def read(setting: Setting, step: int) -> Iterator[Any]:
        from megatron.core import parallel_state

        ranks = parallel_state.get_data_parallel_world_size()
        for number in range(parallel_state.get_data_parallel_rank(), setting.batch, ranks):
            yield arrange(whole_batch(number, step))

    return read


def forward_step(data: Iterator[Any], model: Any) -> tuple[Any, Any]:
    from megatron.core import parallel_state

    batch, arguments = next(data)
    arguments = {"attention_mask": None} | arguments
    losses = model(batch["tokens"], batch["position_ids"], labels=batch["labels"], **arguments)
    mask = batch["loss_mask"]

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total, count = (losses.float() * mask).sum(), mask.sum()
        report = torch.stack([total.detach(), count])
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(report, group=group)
        return total, count.int(), {"loss": report}

    return losses, loss


def sdpa_spec(config: Any) -> Any:
    from ulysses_mc.layers import with_norm, with_ulysses
    from ulysses_mc.layers.specs import gpt_block_local

    if not config.virtual_pipeline_model_parallel_size:  # a block's spec would be one chunk's
        return gpt_block_local(config)
    return with_norm(with_ulysses(local_spec(config), "sdpa"))


def train(setting: Setting, arrange: Arrange, steps: int = 2) -> list[Step]:
    from ulysses_mc.layers import wire_rope

    setting = comparable(setting)
    with megatron_on_cpu():
        setting.initialize()
        chunks = gpt_chunks(setting, stock_spec if arrange is unpacked else sdpa_spec)
        set_weights(chunks)
        if arrange is contiguous:
            wire_rope(chunks)
        trainer = Trainer(setting, chunks, reader(arrange), forward_step)
        return steps_of(trainer, chunks, steps)
