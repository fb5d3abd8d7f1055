"""Every entry of torch.distributed is seen, with the bytes to and from each peer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import batch_isend_irecv as imported_by_name

from tests.support.pool import run_ranks
from tests.support.wire import count_wire

RANKS = 3


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.float64)  # 8 bytes each


def uneven_all_to_all() -> None:
    """Rank r sends r + 1 rows of two numbers to every rank."""
    rank = dist.get_rank()
    received = ones(6, 2)
    dist.all_to_all_single(received, ones(3 * (rank + 1), 2), [1, 2, 3], [rank + 1] * RANKS)


def batch(call: Callable | None = None) -> None:
    """Rank r sends r + 1 numbers to each other rank, in one batch."""
    rank = dist.get_rank()
    peers = [peer for peer in range(RANKS) if peer != rank]
    ops = [dist.P2POp(dist.isend, ones(rank + 1), peer) for peer in peers]
    ops += [dist.P2POp(dist.irecv, ones(peer + 1), peer) for peer in peers]
    for work in (call or dist.batch_isend_irecv)(ops):
        work.wait()


def under_way_together() -> None:
    """Twice: to every other rank and from it, and only then the waiting."""
    peers = [peer for peer in range(RANKS) if peer != dist.get_rank()]
    for _ in range(2):
        works = [dist.irecv(ones(2), peer) for peer in peers]
        for work in [*works, *(dist.isend(ones(2), peer) for peer in peers)]:
            work.wait()


def single_messages() -> None:
    if dist.get_rank() == 0:
        dist.send(ones(5), 2)
    if dist.get_rank() == 2:
        dist.recv(ones(5), 0)


def backward_too() -> None:
    x = ones(RANKS, 2).requires_grad_()
    functional.all_to_all_single_autograd(
        x, [1] * RANKS, [1] * RANKS, dist.group.WORLD
    ).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def data_parallel() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3, bias=False).double())
    with count_wire() as wire:
        model(ones(1, 4)).sum().backward()
    assert wire.by_entry == {"all_reduce": 1} and wire.bytes_sent == 2 * 2 * 96 // 3


def coalesced() -> None:
    from torch.distributed.distributed_c10d import _coalescing_manager

    with _coalescing_manager():
        dist.all_reduce(ones(3))
        dist.all_reduce(ones(6))


FAN = {0: 8, 1: 16, 2: 24}  # what each rank of the uneven cases sends to a peer, in units
CASES = {
    # entry: (call, exchanges, sent per rank, received per rank)
    "all_to_all_single": (uneven_all_to_all, 1, [32, 64, 96], [80, 64, 48]),
    "batch_isend_irecv": (batch, 1, [16, 32, 48], [40, 32, 24]),
    "single messages": (under_way_together, 2, [64] * 3, [64] * 3),
    "all_to_all": (
        lambda: dist.all_to_all([ones(4) for _ in range(3)], [ones(4) for _ in range(3)]),
        1, [64] * 3, [64] * 3,
    ),
    "all_gather": (
        lambda: dist.all_gather([ones(2) for _ in range(3)], ones(2)), 1, [32] * 3, [32] * 3,
    ),
    "all_gather_into_tensor": (
        lambda: dist.all_gather_into_tensor(ones(6), ones(2)), 1, [32] * 3, [32] * 3,
    ),
    "reduce_scatter": (
        lambda: dist.reduce_scatter(ones(2), [ones(2) for _ in range(3)]), 1, [32] * 3, [32] * 3,
    ),
    "reduce_scatter_tensor": (
        lambda: dist.reduce_scatter_tensor(ones(2), ones(6)), 1, [32] * 3, [32] * 3,
    ),
    "all_reduce": (lambda: dist.all_reduce(ones(3)), 1, [32] * 3, [32] * 3),
    "broadcast": (lambda: dist.broadcast(ones(3), 1), 1, [0, 48, 0], [24, 0, 24]),
    "reduce": (lambda: dist.reduce(ones(3), 1), 1, [24, 0, 24], [0, 48, 0]),
    "scatter": (
        lambda: dist.scatter(
            ones(2), [ones(2) for _ in range(3)] if dist.get_rank() == 0 else None, 0
        ),
        1, [32, 0, 0], [0, 16, 16],
    ),
    "gather": (
        lambda: dist.gather(
            ones(2), [ones(2) for _ in range(3)] if dist.get_rank() == 0 else None, 0
        ),
        1, [0, 16, 16], [32, 0, 0],
    ),
    "barrier": (dist.barrier, 0, [0] * 3, [0] * 3),
    "functional all_to_all_single": (backward_too, 2, [64] * 3, [64] * 3),
    "functional all_reduce": (
        lambda: functional.all_reduce(ones(3), "sum", dist.group.WORLD).sum(),
        1, [32] * 3, [32] * 3,
    ),
    "functional all_gather_into_tensor": (
        lambda: functional.all_gather_tensor(ones(2), 0, dist.group.WORLD).sum(),
        1, [32] * 3, [32] * 3,
    ),
    "functional reduce_scatter_tensor": (
        lambda: functional.reduce_scatter_tensor(ones(6), "sum", 0, dist.group.WORLD).sum(),
        1, [32] * 3, [32] * 3,
    ),
    "coalesced all_reduce": (coalesced, 1, [96] * 3, [96] * 3),
}  # fmt: skip


def count_case(name: str) -> tuple[int, dict[str, int], int, int]:
    with count_wire() as wire:
        CASES[name][0]()
    assert dist.get_rank() not in {**wire.sent, **wire.received}
    return wire.exchanges, dict(wire.by_entry), wire.bytes_sent, wire.bytes_received


@pytest.mark.parametrize("name", CASES)
def test_entry_is_counted(name: str) -> None:
    _, exchanges, sent, received = CASES[name]
    results = run_ranks(RANKS, count_case, name)
    assert [result[0] for result in results] == [exchanges] * RANKS
    assert all(set(result[1]) == {name.split()[-1]} for result in results)
    assert [result[2] for result in results] == sent
    assert [result[3] for result in results] == received


def per_peer_and_by_name() -> None:
    original = dist.batch_isend_irecv
    with count_wire() as wire:
        batch(imported_by_name)  # bound at import: the wrapper is in this module's namespace
        single_messages()
    rank = dist.get_rank()
    expected = {peer: 8 * (rank + 1) for peer in range(RANKS) if peer != rank}
    if rank == 0:
        expected[2] += 40
    assert dict(wire.sent) == expected
    assert wire.by_entry["batch_isend_irecv"] == 1
    assert wire.by_entry["messages"] == (rank != 1)
    assert wire.messages == 4 + (rank != 1)
    assert dist.batch_isend_irecv is original is imported_by_name


def in_a_subgroup() -> None:
    group = dist.new_group([0, 2])
    with count_wire() as wire:
        if dist.get_rank() in (0, 2):
            dist.all_reduce(ones(4), group=group)
    assert dict(wire.sent) == {0: {2: 32}, 1: {}, 2: {0: 32}}[dist.get_rank()]


def nothing_after_an_error() -> None:
    with contextlib.suppress(ZeroDivisionError), count_wire() as wire:
        dist.barrier()
        raise ZeroDivisionError
    dist.all_reduce(ones(4))
    assert wire.by_entry == {"barrier": 1}


@pytest.mark.parametrize(
    "check", [per_peer_and_by_name, in_a_subgroup, nothing_after_an_error, data_parallel]
)
def test_wire(check: Callable[[], None]) -> None:
    run_ranks(RANKS, check)
