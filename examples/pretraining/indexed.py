"""Megatron's indexed datasets (`PREFIX.bin` + `PREFIX.idx`), read and checked with numpy alone.

The layout of an index file, little-endian (`megatron/core/datasets/indexed_dataset.py`):

    9 bytes   b"MMIDIDX\\0\\0"           8 bytes  version, 1        1 byte  dtype code
    8 bytes   number of sequences S      8 bytes  number of document boundaries D
    int32[S]  tokens per sequence        int64[S] byte offset of each sequence in the .bin
    int64[D]  document boundaries, as sequence numbers, from 0 to S

Megatron maps these files as they are: a truncated one gives an assertion or reads past the end.
Here every number is compared with the size of the files before anything is trusted.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import UserError

HEADER = b"MMIDIDX\x00\x00"
DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
_FIXED = struct.Struct("<9sQBQQ")


@dataclass(frozen=True)
class IndexedFile:
    """What a checked pair of files holds. `tokens` maps the .bin file, [total tokens]."""

    prefix: str
    sequences: int
    documents: int
    tokens: np.memmap[Any, Any]


def open_checked(prefix: str, vocab_size: int | None = None) -> IndexedFile:
    """Checks `prefix`.idx against `prefix`.bin and opens them.

    Args:
        prefix: path without `.bin` / `.idx`.
        vocab_size: when given, the largest token of (the first and last 16 Mi tokens of) the data
            must be smaller.
    Raises:
        UserError: a file is missing, truncated or damaged; the message names file and numbers.
    """
    idx, bin_ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (idx, bin_):
        if not path.is_file():
            raise UserError(
                f"data file {path} is missing (data.path names the pair by {prefix!r}; "
                "examples/prepare_data.py makes one of a folder of text)"
            )
    size = idx.stat().st_size
    if size < _FIXED.size:
        raise UserError(f"{idx} is damaged: {size} bytes, shorter than its {_FIXED.size}-byte head")
    with idx.open("rb") as stream:
        header, version, code, sequences, boundaries = _FIXED.unpack(stream.read(_FIXED.size))
    if header != HEADER or version != 1 or code not in DTYPES:
        raise UserError(
            f"{idx} is not a Megatron index: header {header!r}, version {version}, dtype code "
            f"{code}; expected {HEADER!r}, 1 and one of {sorted(DTYPES)}"
        )
    expected = _FIXED.size + sequences * (4 + 8) + boundaries * 8
    if size != expected:
        raise UserError(
            f"{idx} is damaged: {sequences} sequences and {boundaries} document boundaries take "
            f"{expected} bytes, the file has {size}"
        )
    dtype = np.dtype(DTYPES[code])
    _check_index(idx, bin_, dtype, sequences, boundaries)
    tokens = np.memmap(bin_, dtype=dtype, mode="r")
    if vocab_size is not None:
        _check_tokens(bin_, tokens, vocab_size)
    return IndexedFile(str(prefix), sequences, boundaries - 1, tokens)


def _check_index(
    idx: Path, bin_: Path, dtype: np.dtype[Any], sequences: int, boundaries: int
) -> None:
    if sequences == 0 or boundaries < 2:
        raise UserError(f"{idx} holds no documents ({sequences} sequences)")
    if bin_.stat().st_size == 0:
        raise UserError(f"{bin_} is empty")
    raw = np.memmap(idx, mode="r", offset=0)
    at = _FIXED.size
    lengths = np.frombuffer(raw, np.int32, sequences, at)
    pointers = np.frombuffer(raw, np.int64, sequences, at + 4 * sequences)
    documents = np.frombuffer(raw, np.int64, boundaries, at + 12 * sequences)
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    if lengths.min() < 0 or pointers[0] != 0 or not np.array_equal(pointers[1:], ends[:-1]):
        raise UserError(f"{idx} is damaged: its offsets do not follow from its sequence lengths")
    if documents[0] != 0 or documents[-1] != sequences or (np.diff(documents) < 0).any():
        raise UserError(f"{idx} is damaged: document boundaries do not rise from 0 to {sequences}")
    if bin_.stat().st_size != ends[-1]:
        raise UserError(
            f"{bin_} is damaged: {idx} describes {ends[-1]} bytes "
            f"({ends[-1] // dtype.itemsize} tokens), the file has {bin_.stat().st_size}"
        )


def _check_tokens(bin_: Path, tokens: np.memmap[Any, Any], vocab_size: int) -> None:
    part = 1 << 24
    ends = tokens[:part], tokens[-part:]
    largest = max(int(end.max()) for end in ends)
    smallest = min(int(end.min()) for end in ends)
    if largest >= vocab_size or smallest < 0:
        bad = smallest if smallest < 0 else largest
        raise UserError(
            f"{bin_} holds token {bad}, the model's vocabulary has {vocab_size}: "
            "the data was made with another tokenizer"
        )


def unigram_entropy(tokens: np.memmap[Any, Any], limit: int = 1 << 26) -> float:
    """Entropy of the token frequencies in nats per token, over the first `limit` tokens.

    It is the loss of the best model that ignores all context: a loss below it shows that a model
    has learned from what precedes a token.
    """
    counts = np.bincount(tokens[:limit].astype(np.int64))
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())
