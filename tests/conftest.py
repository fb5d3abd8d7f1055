"""Shared by all tests: the worker pool's life, and what it imports before it forks."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.support import pool


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(item.get_closest_marker("megatron") for item in session.items):
        pool.preload(["megatron.core"])  # 8 s of CPU: once, not once per worker


def pytest_sessionfinish() -> None:
    pool.close()
