"""Looks into a checkpoint's `.metadata` before torch unpickles it.

PyTorch's checkpoint reader calls `pickle.load` on that file, and a pickle may call anything.
This reads it once with an unpickler that knows only the names a checkpoint's metadata is made of.
(All other files are read by torch.load with weights_only=True.)
"""

from __future__ import annotations

import pickle
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
