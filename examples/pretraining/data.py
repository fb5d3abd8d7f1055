"""Megatron's GPTDataset over .bin/.idx files, and which rank reads which sample.

The order of samples is a property of the run, not of its layout: sample n is the n-th of
Megatron's shuffled order, whatever the number of ranks. A step takes the next
global_batch_size samples; data-parallel ranks share them out, and every tensor, Ulysses, ring
and pipeline rank of one replica reads the same ones. So a run continues at a number of consumed
samples under any other layout.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .config import Config
from .errors import SeenByOneRank, UserError
from .preflight import blend, data_prefixes, describe_data


def microbatch_samples(
    consumed: int, accumulation_steps: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> list[list[int]]:
    """The sample numbers of each micro-batch of one step for one data-parallel rank.

    Over all data-parallel ranks: the numbers from `consumed` on, each once.
    """
    width = micro_batch_size * dp_size
    starts = (consumed + m * width + dp_rank * micro_batch_size for m in range(accumulation_steps))
    return [list(range(start, start + micro_batch_size)) for start in starts]


def build_datasets(
    config: Config, seq_length: int, train_samples: int | None, valid_samples: int | None
) -> tuple[Any, Any]:
    """Training and validation GPTDataset; None where the split gives no part to one.

    Args:
        seq_length: tokens of a sample, before padding.
        train_samples: samples that the run will read; None: one pass over the data.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Documents(GPTDataset):
        """Megatron would count passes over no tokens without end."""

        def _get_num_tokens_per_epoch(self) -> int:
            tokens = int(super()._get_num_tokens_per_epoch())
            if tokens == 0:
                part, prefix = self.index_split.name, self.dataset_path
                raise UserError(
                    f"the {len(self.indices)} documents that data.split {config.data.split!r} "
                    f"takes from {prefix} for {part} hold no tokens: give every part that is not "
                    "0 a document at least, as with more documents or --data.split 50,50,0; or "
                    "--data.split 100,0,0 for no evaluation"
                )
            return tokens

    cache = Path(config.data.cache or Path(config.output) / "data_cache") / _data_digest(config)
    refuse_pickled_arrays(cache)
    if dist.is_initialized():
        dist.barrier()  # rank 0 writes new files there: not while another still reads
    options = GPTDatasetConfig(
        random_seed=config.training.seed,
        sequence_length=seq_length,
        blend=blend(config),
        split=config.data.split,
        path_to_cache=str(cache),
        tokenizer=describe_data(config),
        reset_position_ids=False,
        reset_attention_mask=False,
        # An isolated document's last token would predict the first one of a document unseen.
        eod_mask_loss=config.data.eod_mask_loss or config.data.isolate_documents,
        create_attention_mask=False,  # of 128K x 128K; the attention is causal anyway
    )
    try:
        builder = BlendedMegatronDatasetBuilder(
            Documents, [train_samples, valid_samples, None], lambda: True, options
        )
        train, valid, _ = builder.build()
    except AssertionError as error:
        reason = str(error) or f"its cached indices in {cache} may be damaged; remove them"
        raise UserError(f"Megatron refuses data.path {config.data.path}: {reason}") from error
    return train, valid


def _data_digest(config: Config) -> str:
    """Of the data files' sizes and times: Megatron finds cached indices by the files' names, and
    those of other data under the same name would be read."""
    facts = [
        (end, file.stat().st_size, file.stat().st_mtime_ns)
        for prefix in data_prefixes(config)
        for end in (".bin", ".idx")
        for file in [Path(f"{prefix}{end}")]
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def refuse_pickled_arrays(cache: Path) -> None:
    """Megatron reads its cached indices with allow_pickle: an array of objects runs code."""
    import numpy as np

    for path in sorted(cache.glob("*.npy")):
        try:
            with path.open("rb") as stream:
                np.lib.format.read_magic(stream)
                shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
                bytes_left = path.stat().st_size - stream.tell()
        except (ValueError, EOFError, OSError) as error:
            raise UserError(f"cached index {path} is damaged ({error}); remove it") from None
        if dtype.hasobject:
            raise UserError(f"cached index {path} holds pickled objects; remove it")
        if bytes_left != math.prod(shape) * dtype.itemsize:
            raise UserError(
                f"cached index {path} is damaged ({bytes_left} bytes of numbers, its header says "
                f"{math.prod(shape)} x {dtype.itemsize}); remove it"
            )


def samples_read(dataset: Any, consumed: int, probes: int = 8) -> str:
    """A digest of some of the first `consumed` samples, for a later run to compare its own with."""
    return digest_of_samples(dataset, {consumed * i // probes for i in range(probes) if consumed})


def digest_of_samples(dataset: Any, numbers: Iterable[int]) -> str:
    """Of the tokens of those samples that the dataset has."""
    tokens = hashlib.sha256()
    for number in sorted(n for n in numbers if n < len(dataset)):
        tokens.update(dataset[number]["tokens"].numpy().tobytes())
    return tokens.hexdigest()[:16]


class Batches:
    """The micro-batches of one rank, as dicts of whole (not yet sharded) sequences.

    Args:
        dataset: what indexing gives {tokens, labels, loss_mask, position_ids}, each [s].
        padded_seq_length: s after padding; added tokens have loss_mask 0.
        dp_rank, dp_size: place in the data-parallel group.
        vocab_size: of the model.
        isolate_at: token after which a new document begins, to be kept apart; None: no isolation.

    A sample beyond the end of the dataset is a copy of the last one with loss_mask 0, so that an
    evaluation may end in the middle of a batch.
    """

    def __init__(
        self,
        dataset: Any,
        padded_seq_length: int,
        dp_rank: int,
        dp_size: int,
        vocab_size: int,
        isolate_at: int | None = None,
    ) -> None:
        self.dataset, self.length = dataset, padded_seq_length
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.vocab_size, self.isolate_at = vocab_size, isolate_at

    def step(
        self, consumed: int, accumulation_steps: int, micro_batch_size: int
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yields the accumulation_steps micro-batches of one step, each value [b, s]; with
        isolated documents [1, b x s], and their `cu_seqlens`."""
        for numbers in microbatch_samples(
            consumed, accumulation_steps, micro_batch_size, self.dp_rank, self.dp_size
        ):
            samples = [self.sample(n) for n in numbers]
            batch = {key: torch.stack([s[key] for s in samples]) for key in samples[0]}
            yield batch if self.isolate_at is None else in_one_row(batch, self.isolate_at)

    def sample(self, number: int) -> dict[str, torch.Tensor]:
        inside = number < len(self.dataset)
        item = self.dataset[number if inside else len(self.dataset) - 1]
        _check_tokens(item["tokens"], number, self.vocab_size)
        extra = self.length - item["tokens"].numel()
        pad = torch.nn.functional.pad
        mask = item["loss_mask"] if inside else torch.zeros_like(item["loss_mask"])
        return {
            "tokens": pad(item["tokens"], (0, extra)),
            "labels": pad(item["labels"], (0, extra)),
            "loss_mask": pad(mask, (0, extra)),
            # Padding, which nothing sees, stands at the last position that a model may know.
            "position_ids": torch.arange(self.length).clamp(max=item["tokens"].numel() - 1),
        }


def _check_tokens(tokens: torch.Tensor, number: int, vocab_size: int) -> None:
    """Megatron's vocabulary-parallel layers take a token that they do not know for one of another
    rank: its embedding and its loss would silently be zero.

    Raises:
        SeenByOneRank: a token outside the vocabulary.
    """
    low, high = (int(t) for t in tokens.aminmax())
    if low < 0 or high >= vocab_size:
        raise SeenByOneRank(
            f"sample {number} holds token {low if low < 0 else high}, the model's vocabulary has "
            f"{vocab_size}: the data are damaged, or were made with another tokenizer"
        )


def in_one_row(batch: dict[str, torch.Tensor], end_of_document: int) -> dict[str, torch.Tensor]:
    """[b, s] -> [1, b x s] with the `cu_seqlens` of its documents, none of which sees another.

    A document ends with `end_of_document`, or with the sample; padding belongs to the last one,
    where it comes last and is seen by nothing.
    """
    samples, length = batch["tokens"].shape
    row = batch["tokens"].flatten()
    ends = {int(i) + 1 for i in (row == end_of_document).nonzero()}
    cu = sorted({0, *ends, *range(length, samples * length + 1, length)})
    flat = {name: tensor.reshape(1, -1) for name, tensor in batch.items()}
    del flat["position_ids"]  # those within documents are made when the batch is cut
    return {**flat, "cu_seqlens": torch.tensor(cu, dtype=torch.int32)}
