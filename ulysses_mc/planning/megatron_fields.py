"""Names of Megatron's TransformerConfig, read from the installed source without importing it."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from importlib import util
from pathlib import Path
from typing import Any

from .problems import Problem

_FILES = ("model_parallel_config.py", "transformer/transformer_config.py")


@lru_cache(maxsize=1)
def core_folder() -> Path | None:
    """Where `megatron.core` lies; None where it is not installed."""
    try:
        spec = util.find_spec("megatron")  # the package alone: megatron.core would import torch
    except (ImportError, ValueError):
        return None
    places = (spec.submodule_search_locations or ()) if spec else ()
    folders = (Path(place) / "core" for place in places)
    return next((folder for folder in folders if (folder / _FILES[0]).is_file()), None)


@lru_cache(maxsize=1)
def transformer_fields() -> dict[str, frozenset[str]]:
    """Fields by class of Megatron's config files; {} where Megatron is not installed."""
    folder = core_folder()
    if folder is None:
        return {}
    files = [folder / name for name in _FILES if (folder / name).is_file()]
    return {k: v for file in files for k, v in _classes(file.read_text(encoding="utf-8")).items()}


def _classes(source: str) -> dict[str, frozenset[str]]:
    return {
        node.name: frozenset(
            s.target.id
            for s in node.body
            if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
        )
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def transformer_problems(given: Mapping[str, Any], source: str) -> list[Problem]:
    """A problem for each key of model.transformer that Megatron's config does not have."""
    classes = transformer_fields() if given else {}
    names = ["ModelParallelConfig", "TransformerConfig"]
    if given.get("multi_latent_attention"):
        names.append("MLATransformerConfig")
    known = frozenset[str]().union(*(classes.get(name, frozenset()) for name in names))
    if not known:
        return []
    return [
        Problem(
            f"{source}: unknown key 'model.transformer.{key}'",
            f"every key is a field of Megatron's {names[-1]}",
            "".join(get_close_matches(str(key), known, n=1, cutoff=0.7)),
        )
        for key in given
        if key not in known
    ]
