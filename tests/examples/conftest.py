"""Data for the pretraining example's tests."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.examples.test_indexed import write_pair


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents in which the next token mostly follows from the last one."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    lengths = random.integers(20, 200, 60)
    tokens = (np.arange(lengths.sum()) * 7 + random.integers(0, 2, lengths.sum())) % 95 + 2
    tokens[np.cumsum(lengths) - 1] = 0
    tokens.astype(np.uint16).tofile(folder / "text.bin")
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * 2
    with (folder / "text.idx").open("wb") as out:
        out.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 60, 61))
        out.write(lengths.astype(np.int32).tobytes() + offsets.astype(np.int64).tobytes())
        out.write(np.arange(61, dtype=np.int64).tobytes())
    facts = {"vocab_size": 100, "end_of_document": 0, "padding": 1}
    (folder / "data.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> str:
    """The prefix of data files with a vocabulary of 300."""
    write_pair(tmp_path / "text", [5000, 5000])
    facts = {"vocab_size": 300, "end_of_document": 0, "padding": 1}
    (tmp_path / "data.json").write_text(json.dumps(facts))
    return str(tmp_path / "text")
