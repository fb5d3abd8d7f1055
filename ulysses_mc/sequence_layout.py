"""Which tokens of the global sequence each rank of a group holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING

from .parallel_state.errors import ParallelConfigError

if TYPE_CHECKING:
    import torch

Chunk = tuple[int, int]  # [start, stop) in the global sequence


@dataclass(frozen=True)
class SequenceLayout:
    """The chunks of the global sequence that each rank holds, in the rank's memory order.

    Args:
        chunks: per rank, its `(start, stop)` chunks; together they cover `[0, s)` exactly once.

    Raises:
        ParallelConfigError: the chunks leave a gap or overlap, are not of whole numbers, or are
            those of no rank at all.
    """

    chunks: tuple[tuple[Chunk, ...], ...]

    def __post_init__(self) -> None:
        _check_chunks(self.chunks)
        normal = tuple(_merge_adjacent(rank_chunks) for rank_chunks in self.chunks)
        object.__setattr__(self, "chunks", normal)
        expected = 0
        for start, stop in sorted(chunk for rank_chunks in normal for chunk in rank_chunks):
            if start != expected:
                raise ParallelConfigError(
                    f"A sequence layout whose next chunk is [{start}, {stop}) after token "
                    f"{expected}.",
                    rule="the chunks of all ranks cover the sequence once, without gap or overlap",
                )
            expected = stop

    # -- the layouts in use -------------------------------------------------------------------

    @classmethod
    def contiguous(cls, sequence_length: int, group_size: int) -> SequenceLayout:
        """Rank r holds the r-th run; lengths differ by at most one, longer first (13/4: 4,3,3,3).

        The rule of `torch.tensor_split`.
        """
        _check_sizes([sequence_length], group_size)
        small, longer = divmod(sequence_length, group_size)
        return cls.from_lengths([small + (rank < longer) for rank in range(group_size)])

    @classmethod
    def from_lengths(cls, lengths: Iterable[int]) -> SequenceLayout:
        """Rank r holds the r-th run, of the length given for it (0 allowed)."""
        lengths = list(lengths)
        _check_sizes(lengths, len(lengths))
        chunks, start = [], 0
        for length in lengths:
            chunks.append(((start, start + length),))
            start += length
        return cls(tuple(chunks))

    @classmethod
    def zigzag(cls, sequence_length: int, group_size: int) -> SequenceLayout:
        """Megatron's load-balanced order: rank r holds chunks r and 2P-1-r of 2P equal ones.

        Source: megatron.core.utils.get_batch_on_this_cp_rank.
        """
        return cls.zigzag_packed([0, sequence_length], group_size)

    @classmethod
    def zigzag_packed(cls, cu_seqlens: Sequence[int], group_size: int) -> SequenceLayout:
        """Megatron's packed (THD) order: every document is cut as `zigzag` cuts a sequence.

        One rank holds everything in order, of any length.

        Source: transformer_engine's thd_get_partitioned_indices.
        """
        _check_sizes(cu_seqlens, group_size)
        _check_sizes([end - begin for begin, end in pairwise(cu_seqlens)], group_size)
        if not len(cu_seqlens) or cu_seqlens[0] != 0:
            raise ParallelConfigError(
                f"A zigzag layout of documents between {list(cu_seqlens[:4])}, ...",
                rule="cu_seqlens starts at 0",
            )
        if group_size == 1:
            return cls.from_lengths([cu_seqlens[-1]])
        per_rank: list[list[Chunk]] = [[] for _ in range(group_size)]
        for begin, end in pairwise(cu_seqlens):
            size, left = divmod(end - begin, 2 * group_size)
            if left:
                raise _zigzag_error(end - begin, group_size)
            for rank, rank_chunks in enumerate(per_rank):
                for index in (rank, 2 * group_size - 1 - rank):
                    rank_chunks.append((begin + index * size, begin + (index + 1) * size))
        return cls(tuple(map(tuple, per_rank)))

    # -- questions ----------------------------------------------------------------------------

    @property
    def group_size(self) -> int:
        return len(self.chunks)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # of what may be hundreds of chunks, in every step
        return hash(self.chunks)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens per rank."""
        return tuple(sum(stop - start for start, stop in chunks) for chunks in self.chunks)

    @cached_property
    def sequence_length(self) -> int:
        return sum(self.lengths)

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the ranks' tokens, one rank after the other, are the sequence in order."""
        starts = [chunks[0][0] for chunks in self.chunks if chunks]
        return all(len(chunks) <= 1 for chunks in self.chunks) and starts == sorted(starts)

    def token_indices(self, rank: int) -> list[int]:
        """Global indices of the tokens that `rank` holds, in its memory order."""
        return [token for start, stop in self.chunks[rank] for token in range(start, stop)]

    def positions(self, rank: int, cu_seqlens: Sequence[int] | None = None) -> list[int]:
        """Position of each token of `rank` within its document (within the sequence if None)."""
        if cu_seqlens is None:
            return self.token_indices(rank)
        begin_of = [begin for begin, end in pairwise(cu_seqlens) for _ in range(begin, end)]
        return [token - begin_of[token] for token in self.token_indices(rank)]

    # -- cutting tensors ----------------------------------------------------------------------

    def shard(self, tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """This rank's tokens of a global tensor: [.., s, ..] -> [.., s_r, ..].

        Raises:
            ParallelConfigError: `tensor` is not the length of the sequence along `dim`.
        """
        import torch

        if tensor.size(dim) != self.sequence_length:
            raise ParallelConfigError(
                f"A tensor of {tensor.size(dim)} tokens along dim {dim}, cut by a layout of "
                f"{self.sequence_length} tokens over {self.group_size} ranks.",
                rule="the tensor holds the whole sequence along the dim that is cut",
            )
        pieces = [tensor.narrow(dim, a, b - a) for a, b in self.chunks[rank]]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces, dim) if pieces else tensor.narrow(dim, 0, 0)

    def unshard(self, shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """All ranks' tokens back in global order: P x [.., s_r, ..] -> [.., s, ..]."""
        import torch

        pieces: list[tuple[int, torch.Tensor]] = []
        for rank_chunks, shard in zip(self.chunks, shards, strict=True):
            split: tuple[torch.Tensor, ...] = shard.split(
                [stop - start for start, stop in rank_chunks], dim
            )
            pieces += zip((start for start, _ in rank_chunks), split, strict=True)
        pieces.sort(key=lambda piece: piece[0])
        return torch.cat([shards[0].narrow(dim, 0, 0), *(piece for _, piece in pieces)], dim)


def _is_whole(number: object, least: int) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= least


def _check_sizes(lengths: Sequence[int], group_size: int) -> None:
    """Refuses lengths and numbers of ranks that are no counts."""
    wrong = [f"length {length!r}" for length in lengths if not _is_whole(length, 0)]
    if not _is_whole(group_size, 1):
        wrong.append(f"{group_size!r} ranks")
    if wrong:
        raise ParallelConfigError(
            f"A sequence layout with {wrong[0]}.",
            rule="a length is a whole number of tokens, 0 or more, and a group has 1 rank or more",
            nearest="an int: SequenceLayout.contiguous(sequence_length, group.size()).",
        )


def _check_chunks(chunks: Sequence[Sequence[Chunk]]) -> None:
    """Refuses what is not [(start, stop), ...] of whole numbers for each of one or more ranks."""
    try:
        fits = len(chunks) > 0 and all(
            _is_whole(start, 0) and _is_whole(stop, start) for own in chunks for start, stop in own
        )
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ParallelConfigError(
            f"A sequence layout of chunks {chunks!r:.200}.",
            rule="each rank of the group, one at least, has a list of chunks (start, stop), whole "
            "numbers of tokens with 0 <= start <= stop",
            nearest="SequenceLayout((((0, 4),), ((4, 8),))) for 4 tokens on each of 2 ranks.",
        )


def _merge_adjacent(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """Drops empty chunks and joins those that follow on, so that equal layouts compare equal."""
    merged: list[Chunk] = []
    for start, stop in chunks:
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def _zigzag_error(length: int, group_size: int) -> ParallelConfigError:
    chunks = 2 * group_size
    below, above = length // chunks * chunks, -(-length // chunks) * chunks
    return ParallelConfigError(
        f"A zigzag layout of {length} tokens over {group_size} ranks.",
        f"{length} % (2 x {group_size}) = {length % chunks}.",
        f"zigzag gives each rank two of 2 x {group_size} = {chunks} equal chunks, so {chunks} "
        "divides the length",
        " or ".join(f"{n} tokens" for n in (below, above) if n)
        + "; or, outside Megatron, a contiguous layout, which takes any length (inside, only with "
        "wire_rope(model) and packed_seq_params).",
    )
