"""Groups and an exchange over NCCL; the same functions over gloo, where there is no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import run_ranks
from tests.support.sharded import draw
from ulysses_mc import HeadLayout, SequenceLayout
from ulysses_mc.exchange import Cut
from ulysses_mc.parallel_state import ParallelConfig, initialize_model_parallel
from ulysses_mc.transport import gather_sequence, scatter_sequence

S, B, HEADS, KV, D = 12, 2, 4, 2, 4
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def over_nccl(ranks: int) -> list[pytest.MarkDecorator]:
    reason = f"NCCL needs a GPU for each of {ranks} ranks, here are {GPUS}"
    return [pytest.mark.gpu, pytest.mark.skipif(ranks > GPUS, reason=reason)]


def groups_and_exchange(device_type: str) -> None:
    """Both transports bring the whole sequence of this rank's heads, and take it back."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    backend = {"cuda": "nccl", "cpu": "gloo"}[device_type]
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    state = initialize_model_parallel(
        ParallelConfig(ulysses_parallel_size=ranks), use_megatron=False
    )
    group = state.group("ulysses")
    assert dist.get_process_group_ranks(group) == list(range(ranks))
    assert dist.get_backend(group) == backend
    layout, heads = SequenceLayout.contiguous(S, ranks), HeadLayout(HEADS, KV, ranks)
    whole = [draw(S, B, n, D, seed=n).to(device_type) for n in (HEADS, KV)]
    cuts = [Cut(layout, heads.query_heads), Cut(layout, heads.kv_heads)]
    parts = [layout.shard(tensor, 0, rank).contiguous() for tensor in whole]
    for transport in ("p2p", "all_to_all"):
        found = gather_sequence(parts, cuts, group, False, transport)
        for tensor, cut, all_heads in zip(found, cuts, whole, strict=True):
            own = cut.heads[rank]
            assert torch.equal(tensor, all_heads[:, :, own.start : own.stop]), transport
        back = scatter_sequence(found, cuts, group, False, transport)
        for tensor, part in zip(back, parts, strict=True):
            assert torch.equal(tensor, part), transport


@pytest.mark.parametrize(
    ("ranks", "device"),
    [
        pytest.param(1, "cuda", marks=over_nccl(1)),
        pytest.param(2, "cuda", marks=over_nccl(2)),
        (1, "cpu"),
        (2, "cpu"),
    ],
)
def test_groups_and_exchange(ranks: int, device: str) -> None:
    backend = {"cuda": "nccl", "cpu": "gloo"}[device]
    run_ranks(ranks, groups_and_exchange, device, backend=backend, timeout=120)
