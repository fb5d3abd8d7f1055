"""Cross-attention of other lengths, tokens that every rank holds, and other lengths per call."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.fuzz.draws import Draw
from tests.fuzz.test_fuzz import check
from tests.support.oracle import attention
from tests.support.pool import run_ranks
from tests.support.sharded import check_against_oracle, draw, draw_qkv
from ulysses_mc import ParallelConfigError, SequenceLayout
from ulysses_mc.layers import UlyssesAttention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("s", "s_kv"), [(5, 13), (13, 5), (2, 7), (9, 1)])
def test_cross_attention(s, s_kv, causal) -> None:
    query, (_, key, value) = draw(2, s, 6, 4), draw_qkv(2, s_kv, 6, 3, dv=5, seed=1)
    layouts = (SequenceLayout.contiguous(s, 4), SequenceLayout.contiguous(s_kv, 4))
    check_against_oracle(4, (query, key, value), *layouts, causal=causal)


JOINT = {
    "heads": 6,
    "kv_heads": 3,
    "tensor": 1,
    "ulysses": 4,
    "head_dim": 4,
    "value_dim": 3,
    "layout": (((0, 3),), ((3, 5),), (), ((5, 9),)),
    "joint": 2,
    "counted": True,
}


@pytest.mark.parametrize("joint_front", [False, True])
@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("documents", [None, (4, 1, 6)])
def test_joint_tokens_are_counted_once(joint_front, batch, documents) -> None:
    options = {"batch": batch, "joint_front": joint_front, "documents": documents}
    assert not check([Draw(**JOINT, **options, causal=True, sinks=True, bias="hsu")])


def train_then_evaluate(shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """One module, built for the first length, on batches of other sizes and lengths."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layouts = [SequenceLayout.contiguous(s, size) for _, s in shapes]
    attend = UlyssesAttention(dist.group.WORLD, layouts[0])
    results = []
    for (b, s), layout in zip(shapes, layouts, strict=True):
        local = [layout.shard(tensor, 1, rank) for tensor in draw_qkv(b, s, 4, 2)]
        with torch.inference_mode(bool(results)):
            results.append(attend(*local, causal=True, sequence_layout=layout))
    out = attend(*(layouts[0].shard(t, 1, rank) for t in draw_qkv(*shapes[0], 4, 2)), causal=True)
    return [*results, out]


def test_row_28_evaluation_with_other_batch_sizes_and_odd_lengths() -> None:
    shapes = [(2, 16), (1, 13), (5, 7), (3, 2)]
    by_rank = run_ranks(4, train_then_evaluate, shapes)
    for (b, s), *parts in zip([*shapes, shapes[0]], *by_rank, strict=True):
        right = attention(*draw_qkv(b, s, 4, 2), causal=True)
        torch.testing.assert_close(torch.cat(parts, 1), right, rtol=1e-10, atol=1e-10)


def joint_of_other_lengths(front: bool, documents: bool) -> None:
    """More joint keys than joint queries, as where a text encoder adds keys of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = SequenceLayout.contiguous(9, size)
    split, joint_query = draw_qkv(2, 9, 6, 3), draw(2, 2, 6, 4, seed=7)
    _, joint_key, joint_value = draw_qkv(2, 4, 6, 3, seed=8)
    joint = (joint_query, joint_key, joint_value)
    whole = [torch.cat([j, t] if front else [t, j], 1) for j, t in zip(joint, split, strict=True)]
    module = UlyssesAttention(dist.group.WORLD, layout)
    local = [layout.shard(t, 1, rank) for t in split]
    names = ("joint_query", "joint_key", "joint_value")
    given = dict(zip(names, joint, strict=True), joint_position="front" if front else "rear")
    mask = torch.rand(11, 13, generator=torch.Generator().manual_seed(0)) > 0.3
    mask[:, 0] = True
    if documents:
        with pytest.raises(ParallelConfigError, match="cu_seqlens"):
            module(*local, cu_seqlens=[0, 11], **given)
        return
    with pytest.raises(ParallelConfigError, match="13"):
        module(*local, attention_mask=mask[:, :11], **given)
    out, joint_out = module(*local, attention_mask=mask, **given)
    right = attention(*whole, allowed=mask)
    right_joint, right_split = (
        (right[:, :2], right[:, 2:]) if front else (right[:, 9:], right[:, :9])
    )
    torch.testing.assert_close(out, layout.shard(right_split, 1, rank), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(joint_out, right_joint, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("front", [False, True])
@pytest.mark.parametrize("documents", [False, True])
def test_joint_keys_of_another_length_than_the_queries(front, documents) -> None:
    run_ranks(3, joint_of_other_lengths, front, documents, timeout=60)
