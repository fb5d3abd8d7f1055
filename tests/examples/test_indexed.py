"""Every damaged .bin/.idx pair is refused by name, with the numbers."""

import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from examples.pretraining.errors import UserError
from examples.pretraining.indexed import open_checked, unigram_entropy


def write_pair(prefix: Path, lengths: list[int], dtype: type = np.uint16, code: int = 8) -> None:
    """An independent writer of the format, from its description."""
    tokens = np.arange(sum(lengths)) % 100
    tokens.astype(dtype).tofile(f"{prefix}.bin")
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * np.dtype(dtype).itemsize
    with open(f"{prefix}.idx", "wb") as out:
        out.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, code))
        out.write(struct.pack("<QQ", len(lengths), len(lengths) + 1))
        out.write(np.array(lengths, np.int32).tobytes() + offsets.astype(np.int64).tobytes())
        out.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_pair(tmp_path / "text", [5, 1, 200])
    return tmp_path / "text"


def change(path: Path, offset: int, value: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(value)] = value
    path.write_bytes(data)


def test_a_whole_pair_opens(prefix: Path) -> None:
    data = open_checked(str(prefix), vocab_size=100)
    assert (data.sequences, data.documents, len(data.tokens)) == (3, 3, 206)


def test_megatrons_own_reader_agrees_with_the_format(prefix: Path) -> None:
    dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset").IndexedDataset
    assert [len(x) for x in dataset(str(prefix))] == [5, 1, 200]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: Path(f"{p}.bin").unlink(), "text.bin is missing"),
        (lambda p: Path(f"{p}.idx").unlink(), "text.idx is missing"),
        (lambda p: Path(f"{p}.idx").write_bytes(b"MMIDIDX"), "shorter than its 34-byte head"),
        (lambda p: change(Path(f"{p}.idx"), 0, b"X"), "is not a Megatron index"),
        (lambda p: change(Path(f"{p}.idx"), 9, b"\x07"), "version 7"),
        (lambda p: change(Path(f"{p}.idx"), 17, b"\x63"), "dtype code 99"),
        (lambda p: change(Path(f"{p}.idx"), 18, b"\xff" * 8), "is damaged: 18446744073709551615"),
        (lambda p: change(Path(f"{p}.idx"), 34, b"\x06"), "do not follow"),
        (lambda p: change(Path(f"{p}.idx"), 70, b"\x01"), "do not rise"),
        (lambda p: Path(f"{p}.bin").write_bytes(b"\0" * 410), "412 bytes (206 tokens), the file"),
        (lambda p: change(Path(f"{p}.bin"), 0, b"\xff\xff"), "holds token 65535"),
    ],
)
def test_damage_is_named(prefix: Path, damage, message: str) -> None:
    damage(prefix)
    with pytest.raises(UserError, match=r"text\.(bin|idx)") as caught:
        open_checked(str(prefix), vocab_size=100)
    assert message in str(caught.value)


def test_a_truncated_index_is_named(prefix: Path) -> None:
    idx = Path(f"{prefix}.idx")
    shutil.copy(idx, f"{idx}.whole")
    idx.write_bytes(idx.read_bytes()[:-8])
    with pytest.raises(UserError, match="3 sequences and 4 document boundaries take 102 bytes"):
        open_checked(str(prefix))


def test_unigram_entropy_of_a_known_distribution(tmp_path: Path) -> None:
    np.array([0, 0, 1, 2], np.uint16).tofile(tmp_path / "t.bin")
    tokens = np.memmap(tmp_path / "t.bin", np.uint16, "r")
    assert unigram_entropy(tokens) == pytest.approx(1.5 * np.log(2))


def test_a_negative_token_is_named(tmp_path: Path) -> None:
    write_pair(tmp_path / "text", [3], np.int32, 4)
    np.array([1, -1, 2], np.int32).tofile(tmp_path / "text.bin")
    with pytest.raises(UserError, match=r"text\.bin holds token -1"):
        open_checked(str(tmp_path / "text"), vocab_size=100)


def test_random_damage_never_reaches_beyond_the_files(tmp_path: Path) -> None:
    """Whatever bytes are changed, cut off or added: refused, or still inside the .bin file."""
    write_pair(tmp_path / "whole", [5, 1, 200, 0, 7])
    index = (tmp_path / "whole.idx").read_bytes()
    draw, accepted = random.Random(0), 0
    for _ in range(500):
        data = bytearray(index)
        for _ in range(draw.choice((1, 1, 2, 8))):
            data[draw.randrange(len(data))] = draw.choice(
                (0, 1, 127, 128, 255, draw.randrange(256))
            )
        size = draw.choice((len(data), len(data), draw.randrange(len(data)), len(data) + 8))
        (tmp_path / "text.idx").write_bytes(bytes(data[:size]).ljust(size, b"\0"))
        content = (tmp_path / "whole.bin").read_bytes()
        (tmp_path / "text.bin").write_bytes(content)
        try:
            open_checked(str(tmp_path / "text"))
        except UserError:
            continue
        accepted += 1
        version, code, sequences, boundaries = struct.unpack_from("<QBQQ", data, 9)
        lengths = struct.unpack_from(f"<{sequences}i", data, 34)
        offsets = struct.unpack_from(f"<{sequences}q", data, 34 + 4 * sequences)
        documents = struct.unpack_from(f"<{boundaries}q", data, 34 + 12 * sequences)
        width = {1: 1, 2: 1, 3: 2, 8: 2, 4: 4, 5: 8}[code]
        for length, offset in zip(lengths, offsets, strict=True):
            assert 0 <= offset <= offset + length * width <= len(content)
        assert all(0 <= d <= sequences for d in documents) and version == 1
    assert 0 < accepted < 250  # such as a moved document boundary
