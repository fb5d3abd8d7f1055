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
from examples.pretraining.safe_load import check_metadata, only_tensors


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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_object_in_a_shard_runs_nothing(tmp_path: Path) -> None:
    """PyTorch's reader by itself would: that is the second half, and the reason for the first."""
    import torch.distributed.checkpoint as dcp

    target, folder = tmp_path / "was_run", tmp_path / "checkpoint"
    dcp.save({"rng": Evil(target)}, checkpoint_id=folder, no_dist=True)
    check_metadata(folder / ".metadata")
    with pytest.raises(dcp.CheckpointException, match="Weights only load failed"), only_tensors():
        dcp.load({"rng": 0}, checkpoint_id=folder, no_dist=True)
    assert not target.exists() and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    dcp.load({"rng": 0}, checkpoint_id=folder, no_dist=True)
    assert target.exists()
