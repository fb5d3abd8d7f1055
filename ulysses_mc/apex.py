"""NVIDIA's apex, told from the unrelated package of that name on the package index."""

from __future__ import annotations

from importlib import util
from pathlib import Path


def nvidia_apex(search: list[str] | None = None) -> bool:
    """Whether apex is NVIDIA's: `optimizers` holds FusedAdam. A package of that name is not enough.

    Imports nothing.

    Args:
        search: folders to look in, None: as Python imports.
    """
    for folder in _folders(search):
        optimizers = folder / "optimizers"
        init = optimizers / "__init__.py"
        if (optimizers / "fused_adam.py").is_file():
            return True
        if init.is_file() and "FusedAdam" in init.read_text(errors="replace"):
            return True
    return False


def _folders(search: list[str] | None) -> list[Path]:
    if search is not None:
        return [Path(folder) / "apex" for folder in search]
    try:
        spec = util.find_spec("apex")
    except (ImportError, ValueError):
        return []
    return [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
