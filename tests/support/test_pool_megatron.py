"""Workers keep Megatron imported and forget its parallel state."""

from __future__ import annotations

import sys

import pytest
import torch.distributed as dist

from tests.support.pool import run_ranks

pytestmark = pytest.mark.megatron


def groups(tensor_parallel: int) -> tuple[bool, bool, list[int]]:
    imported = "megatron.core.parallel_state" in sys.modules
    from megatron.core import parallel_state

    before = parallel_state.model_parallel_is_initialized()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    ranks = dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
    return imported, before, ranks


@pytest.mark.parametrize(("tensor_parallel", "ranks"), [(2, [0, 1]), (1, [0]), (2, [0, 1])])
def test_parallel_state_is_destroyed_after_each_test(tensor_parallel: int, ranks: list) -> None:
    pytest.importorskip("megatron.core")
    results = run_ranks(2, groups, tensor_parallel)
    assert results[0] == (True, False, ranks)
