"""A checkpoint is data: reading one runs no code that it brings.

PyTorch's checkpoint reader does two things otherwise, and a pickle may call anything.

* It calls `pickle.load` on `.metadata`. `check_metadata` reads that file first, with an unpickler
  that knows only the names a checkpoint's metadata is made of.
* It reads what is not a tensor (the random state, and with megatron-core 0.19 the optimizer's
  settings) by `torch.load(weights_only=False)` (`torch/distributed/checkpoint/default_planner.py`).
  `only_tensors` forbids that.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import UserError

_ALLOWED = {
    "builtins": {"set", "frozenset", "slice", "complex"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch._utils": {"_rebuild_device"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and name.rstrip("0123456789_").isalpha() and _is_dtype(name)
        if is_dtype or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of checkpoint metadata")


def _is_dtype(name: str) -> bool:
    import torch

    return isinstance(getattr(torch, name, None), torch.dtype)


def check_metadata(path: Path) -> None:
    """Raises UserError if `path` holds anything but checkpoint metadata, without running it."""
    try:
        with path.open("rb") as stream:
            _Unpickler(stream).load()
    except Exception as error:  # a damaged pickle fails in as many ways as there are opcodes
        raise UserError(f"{path} is refused: {error!r}") from None


@contextlib.contextmanager
def only_tensors() -> Iterator[None]:
    """Every torch.load inside is one with weights_only=True, whatever it asks for."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
