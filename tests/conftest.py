"""Shared by all tests: the worker pool's life, and what it imports before it forks."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed's choice when it is imported

import pytest

from tests.support import pool

_PRELOADED = {
    "megatron": ["megatron.core"],
    "huggingface": ["transformers.models.llama.modeling_llama"],
    "deepspeed": ["deepspeed"],
    "compiler": ["torch._dynamo"],
}


def pytest_collection_finish(session: pytest.Session) -> None:
    for marker, modules in _PRELOADED.items():  # 3 to 8 s of CPU: once, not once per worker
        if any(item.get_closest_marker(marker) for item in session.items):
            pool.preload(modules)
    gc.collect()
    gc.freeze()  # what is loaded stays: a collection need not look at it again


def pytest_sessionfinish() -> None:
    pool.close()
