"""The exchange on real ranks: where data lands, what it sends, what it copies."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.copies import count_copies
from tests.support.pool import run_ranks
from tests.support.wire import count_wire
from ulysses_mc import HeadLayout, ParallelConfigError, SequenceLayout
from ulysses_mc.exchange import Cut, heads_to_sequence, sequence_to_heads
from ulysses_mc.layers import UlyssesAttention
from ulysses_mc.layers.local import sdpa_attention
from ulysses_mc.transport import memory, messages
from ulysses_mc.transport.plan import plan_scatter

TRANSPORTS = ("p2p", "all_to_all")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layouts(size: int) -> list[SequenceLayout]:
    return [
        SequenceLayout.contiguous(5 * size, size),
        SequenceLayout.contiguous(3 * size - 1, size),
        SequenceLayout.contiguous(size - 1, size),  # the last rank holds nothing
        SequenceLayout.zigzag(4 * size, size),
        SequenceLayout.zigzag_packed([0, 2 * size, 6 * size], size),
        SequenceLayout.from_lengths([*range(size)]),
    ]


def check_data_movement() -> None:
    """Every value lands where the layouts say, and back, bit for bit."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    for layout, (heads, kv), batch, batch_first, transport in itertools.product(
        layouts(size),
        [(2 * size, size), (7, 7), (size, 1), (1, 1)],
        (1, 3),
        (False, True),
        TRANSPORTS,
    ):
        split = HeadLayout(heads, kv, size)
        cuts = [Cut(layout, split.query_heads), Cut(layout, split.kv_heads)]
        whole = [draw(layout.sequence_length, batch, n, d) for n, d in ((heads, 3), (kv, 2))]
        if batch_first:
            whole = [tensor.transpose(0, 1) for tensor in whole]
        given = [layout.shard(tensor, int(batch_first), rank) for tensor in whole]
        options = {"batch_first": batch_first, "transport": transport}
        by_heads = sequence_to_heads(given, cuts, group, **options)
        for tensor, cut, arrived in zip(whole, cuts, by_heads, strict=True):
            mine = cut.heads[rank]
            assert torch.equal(arrived, tensor[:, :, mine.start : mine.stop])
        (back,) = heads_to_sequence(by_heads[:1], cuts[:1], group, **options)
        assert torch.equal(back, given[0])
        assert back.is_contiguous()


@pytest.mark.parametrize("size", [2, 4])
def test_data_movement(size):
    run_ranks(size, check_data_movement, timeout=90)


def check_in_a_batch() -> None:
    """As over NCCL: one batch, and one copy for the ranks whose heads follow on."""
    with patch.object(messages, "_joins_messages", lambda group: True), count_wire() as wire:
        check_data_movement()
    assert set(wire.by_entry) == {"batch_isend_irecv", "all_to_all_single"}


@pytest.mark.parametrize("size", [2, 4])
def test_messages_in_one_batch(size):
    run_ranks(size, check_in_a_batch, timeout=90)


def check_counts(heads: int, kv: int, zigzag: bool, transport: str, batch: int) -> dict[str, float]:
    """One layer and step; asserts bytes, returns what else was counted."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    length, d, dv = 8 * size, 16, 16
    make = SequenceLayout.zigzag if zigzag else SequenceLayout.contiguous
    layout, split = make(length, size), HeadLayout(heads, kv, size)
    query, key, value = (
        draw(batch, layout.lengths[rank], n, e).requires_grad_()
        for n, e in ((heads, d), (kv, d), (kv, dv))
    )
    gradient = draw(batch, layout.lengths[rank], heads, dv)
    with count_copies() as copies, count_wire() as wire:
        local = copies.uncounted(sdpa_attention)
        attention = UlyssesAttention(group, layout, local_attention=local, transport=transport)
        attention(query, key, value, causal=True).backward(gradient)
    options = {"batch_size": batch, "head_dim": d, "value_head_dim": dv, "element_size": 8}
    forward = split.bytes_received(rank, layout.lengths, **options)
    assert split.bytes_sent(rank, layout.lengths, **options) + forward == wire.bytes_received
    assert wire.bytes_sent == wire.bytes_received
    local_query = query.numel() * query.element_size()
    return {
        "exchanges": wire.exchanges,
        "messages": wire.messages,
        "copies": copies.bytes / local_query,
    }


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("heads", "kv"), [(8, 8), (8, 4), (8, 2), (8, 1), (7, 7), (6, 3)])
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_four_exchanges_and_the_fewest_bytes(size, heads, kv, zigzag, transport):
    for batch in (1, 2):
        for counts in run_ranks(size, check_counts, heads, kv, zigzag, transport, batch):
            assert counts["exchanges"] == 4


@pytest.mark.parametrize("zigzag", [False, True])
def test_one_message_for_query_key_and_value(zigzag):
    """To each of 3 peers and from it: q, k and v as one; out; its gradient; dq; each once for a
    run of tokens; dk and dv, of half its size, packed as one. Of the zigzag ranks 0, 1, 2 have two
    runs, 3 has one."""
    runs = [2, 2, 2, 1] if zigzag else [1] * 4
    for rank, counts in enumerate(run_ranks(4, check_counts, 8, 4, zigzag, "p2p", 1)):
        of_peers = sum(runs) - runs[rank]
        assert counts["messages"] == (3 * runs[rank] + of_peers) * (1 + 1 + 1 + 1) + (3 + 3)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("transport", "zigzag", "batch", "most"),
    [("p2p", False, 1, 8), ("p2p", False, 3, 8), ("p2p", True, 1, 8), ("all_to_all", False, 1, 11)],
)
def test_full_tensor_copies(size, transport, zigzag, batch, most):
    for counts in run_ranks(size, check_counts, 8, 8, zigzag, transport, batch):
        assert counts["copies"] <= most


def evaluate_then_train() -> None:
    """What an evaluation leaves behind must not be memory that training may not use."""
    with patch.object(memory, "_arena", memory._Arena()):
        check_evaluation_then_training()


def check_evaluation_then_training() -> None:
    attention = UlyssesAttention(dist.group.WORLD)
    whole = [draw(1, 8, 4, 2, seed=n) for n in range(3)]
    part = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    with torch.inference_mode():
        expected = attention(*(tensor[:, part].repeat(1, 1, 1, 1) for tensor in whole))
    for larger in (1, 3):  # with the memory that was kept, and with more
        leaves = [t[:, part].repeat(larger, 1, 1, 1).requires_grad_() for t in whole]
        out = attention(*leaves)
        out.sum().backward()
        assert torch.equal(out[:1], expected)


def test_training_after_an_evaluation_in_inference_mode():
    run_ranks(2, evaluate_then_train)


def change_what_backward_gives(transport: str) -> None:
    """In place, with what requires gradients: and batched gradients are refused, not sent."""
    rank = dist.get_rank()
    cut = Cut(SequenceLayout.contiguous(6, 2), HeadLayout(4, 4, 2).query_heads)
    for verb, (s, h), first in itertools.product(
        (sequence_to_heads, heads_to_sequence), ((3, 4), (6, 2)), (False, True)
    ):
        if (verb is sequence_to_heads) != (s == 3):
            continue
        shape = (2, s, h, 3) if first else (s, 2, h, 3)
        x = draw(*shape, seed=rank).requires_grad_()
        (out,) = verb([x], [cut], dist.group.WORLD, batch_first=first, transport=transport)
        batched = torch.ones(2, *out.shape, dtype=out.dtype)
        with pytest.raises(ParallelConfigError, match="is_grads_batched"):
            torch.autograd.grad(out, x, batched, is_grads_batched=True, retain_graph=True)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        gradient += torch.ones_like(x).requires_grad_()
        assert torch.equal(gradient.detach(), torch.full_like(x, 2.0))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gradients_may_be_changed_and_not_be_batched(transport):
    run_ranks(2, change_what_backward_gives, transport)


def test_kept_buffers_are_of_the_type_and_of_the_present_memory():
    """Views are kept with their memory: not those of another type, nor of memory that was too
    small, which they would hold for ever; and not without end."""
    cut = Cut(SequenceLayout.contiguous(8, 2), HeadLayout(4, 4, 2).query_heads)
    single, double = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    arena = memory._Arena()
    with patch.object(memory, "_arena", arena):
        small = plan_scatter([0], cut, 0, (8, 1, 2, 3), False)
        for like in (single, double, single):
            (buffers,) = memory.scratch(like, [small])
            assert {buffer.dtype for buffer in buffers} == {like.dtype}
        assert memory.scratch(single, [small])[0] is buffers
        for dim in range(2 * memory.PLANS_KEPT, 0, -1):  # the first needs more memory
            memory.scratch(single, [plan_scatter([0], cut, 0, (8, 1, 2, dim), False)])
            kept = [buffer for ((*buffers,),) in arena.views.values() for buffer in buffers]
            assert len(kept) <= memory.PLANS_KEPT
            for buffer in kept:
                assert buffer.untyped_storage().data_ptr() == arena.bytes.data_ptr()


def check_one_rank_costs_nothing() -> None:
    query, key, value = (draw(2, 6, n, 4).requires_grad_() for n in (4, 2, 2))
    with count_copies() as copies, count_wire() as wire:
        attention = UlyssesAttention(
            dist.group.WORLD, local_attention=copies.uncounted(sdpa_attention)
        )
        attention(query, key, value, causal=True).sum().backward()
    assert (wire.exchanges, copies.bytes) == (0, 0)
    layout = SequenceLayout.contiguous(2, 1)
    cuts = [Cut(layout, (range(n),)) for n in (4, 2)]
    moved = sequence_to_heads([query, key], cuts, dist.group.WORLD)
    assert moved[0] is query and moved[1] is key


def test_a_group_of_one_costs_nothing():
    run_ranks(1, check_one_rank_costs_nothing)


def check_other_types() -> None:
    layout, rank = SequenceLayout.contiguous(8, 2), dist.get_rank()
    cuts = [Cut(layout, HeadLayout(4, 4, 2).query_heads)] * 2
    for verb, shape in ((sequence_to_heads, (4, 1, 4, 3)), (heads_to_sequence, (8, 1, 2, 3))):
        for transport in TRANSPORTS:
            tensors = [draw(*shape, seed=rank), draw(*shape, seed=rank).float()]
            with pytest.raises(ParallelConfigError, match=r"types torch\.float64, torch\.float32"):
                verb(tensors, cuts, dist.group.WORLD, transport=transport)


def test_types_that_differ_are_refused_before_any_collective():
    run_ranks(2, check_other_types)


def give_wrong_length() -> None:
    layout = SequenceLayout.contiguous(8, 2)
    attention = UlyssesAttention(dist.group.WORLD, layout)
    attention(*(torch.zeros(1, 5, 4, 8) for _ in range(3)))


def test_a_wrong_length_is_refused_before_any_collective():
    errors = run_ranks(2, give_wrong_length, return_exceptions=True)
    for error in errors:
        assert isinstance(error, ParallelConfigError)
        assert "4 tokens" in str(error) and "[1, 5, 4, 8]" in str(error)
