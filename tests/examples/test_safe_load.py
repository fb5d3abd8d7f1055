"""A checkpoint's .metadata is looked at before anything in it can run."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from examples.pretraining.errors import UserError
from examples.pretraining.safe_load import check_metadata


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def write(path: Path, value: object) -> Path:
    path.write_bytes(pickle.dumps(value))
    return path


def metadata(extra: object) -> Metadata:
    tensor = TensorStorageMetadata(
        TensorProperties(torch.bfloat16),
        torch.Size([4]),
        [ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))],
    )
    return Metadata({"weight": tensor, "rng": BytesStorageMetadata()}, planner_data=extra)


def test_metadata_of_a_checkpoint_passes(tmp_path: Path) -> None:
    check_metadata(write(tmp_path / ".metadata", metadata({"a": 1})))


def test_what_would_run_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    target = tmp_path / "was_run"
    path = write(tmp_path / ".metadata", metadata(Evil(target)))
    with pytest.raises(UserError, match=r"mkdir is not part of checkpoint metadata"):
        check_metadata(path)
    assert not target.exists()


@pytest.mark.parametrize("content", [b"", b"\x80\x04garbage", b"\x00" * 10])
def test_damage_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match="is refused"):
        check_metadata(tmp_path / ".metadata")
