"""The Hugging Face examples learn: their loss falls below that of a model without context."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.pool import run_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.huggingface

EXAMPLES = Path(__file__).parents[2] / "examples"
VOCABULARY = 32


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Tokens that follow from the one before: unigram entropy log 32 = 3.47, with context 0."""
    tokens = np.tile(np.random.default_rng(0).permutation(VOCABULARY), 100).astype(np.uint16)
    tokens.tofile(tmp_path / "text.bin")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 1, 2)
    body = np.int32(len(tokens)).tobytes() + np.int64(0).tobytes()
    (tmp_path / "text.idx").write_bytes(head + body + np.array([0, 1], np.int64).tobytes())
    facts = {"vocab_size": VOCABULARY, "unigram_entropy_nats": float(np.log(VOCABULARY))}
    (tmp_path / "data.json").write_text(json.dumps(facts))
    return tmp_path


def run_example(name: str, data: Path, *options: str) -> list[float]:
    from importlib import import_module

    sys.path.insert(0, str(EXAMPLES))
    sizes = ["--steps", "40", "--sequence-length", "30", "--hidden", "32", "--lr", "1e-2"]
    module = import_module(name)
    losses: list[float] = module.main(["--data", str(data), *sizes, *options])
    return losses


@pytest.mark.parametrize(
    "options", [["--ulysses", "2"], ["--ulysses", "2", "--hsdp", "--bf16"]], ids=" ".join
)
def test_fsdp2(data: Path, options: list[str]) -> None:
    losses, *others = run_ranks(4, run_example, "fsdp2", data, *options, timeout=90)
    assert all(other == losses for other in others)
    assert losses[-1] < 1.0 < np.log(VOCABULARY) < losses[0] + 0.5


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_zero(data: Path, stage: int) -> None:
    pytest.importorskip("deepspeed")
    losses = run_ranks(2, run_deepspeed, data, stage, timeout=90)[0]
    assert losses[-1] < 1.0 < np.log(VOCABULARY) < losses[0] + 0.5


def run_deepspeed(data: Path, stage: int) -> list[float]:
    from tests.zero.deepspeed_engine import deepspeed_left_clean

    with deepspeed_left_clean():
        return run_example("deepspeed_zero", data, "--ulysses", "2", "--stage", str(stage))
