"""NVIDIA's apex, told from the unrelated package of that name on the package index."""

from __future__ import annotations

from importlib import util
from pathlib import Path


def nvidia_apex(search: list[str] | None = None) -> bool:
    """Whether apex is NVIDIA's: its FusedAdam calls the extension amp_C. A name is not enough.

    Imports nothing.

    Args:
        search: folders to look in, None: as Python imports.
    """
    for folder in _folders(search):
        adam = folder / "optimizers" / "fused_adam.py"
        if adam.is_file() and "amp_C" in adam.read_text(errors="replace"):
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
