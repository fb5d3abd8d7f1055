"""Types under autocast and outside, ranks without heads among them; copies of a model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from tests.support.oracle import attention as oracle
from tests.support.pool import run_ranks
from ulysses_mc import ParallelConfigError, SequenceLayout
from ulysses_mc.layers import UlyssesAttention

S, D = 12, 8


def tensors(heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(heads)
    return [torch.randn(2, S, heads, D, generator=generator) for _ in range(3)]


def under_autocast(heads: int, dtypes: list[torch.dtype]) -> tuple[torch.Tensor, ...]:
    group, layout = dist.group.WORLD, SequenceLayout.contiguous(S, dist.get_world_size())
    begin, end = layout.chunks[dist.get_rank()][0]
    own = [
        t[:, begin:end].to(dtype).requires_grad_()
        for t, dtype in zip(tensors(heads), dtypes, strict=True)
    ]
    attention = copy.deepcopy(UlyssesAttention(group, layout))  # a copy shares the group
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*own, causal=True)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert [leaf.grad.dtype for leaf in own] == dtypes
    return (out, *(leaf.grad.double() for leaf in own))


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("heads", [2, 3])  # of 3 ranks
@pytest.mark.parametrize("dtypes", [[F32] * 3, [F32, F32, BF16], [BF16, BF16, F32]])
def test_autocast(heads: int, dtypes: list[torch.dtype]) -> None:
    whole = [t.double().requires_grad_() for t in tensors(heads)]
    right = oracle(*whole, causal=True)
    right.sum().backward()
    ranks = run_ranks(3, under_autocast, heads, dtypes)
    for index, expected in enumerate([right.detach(), *(leaf.grad for leaf in whole)]):
        found = torch.cat([rank[index].double() for rank in ranks], 1)
        assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def refused() -> None:
    attention = UlyssesAttention(dist.group.WORLD)
    query, key, value = (t[:, :6] for t in tensors(4))
    with pytest.raises(ParallelConfigError, match=r"float32, torch\.bfloat16, torch\.float32"):
        attention(query, key.bfloat16(), value)
    with pytest.raises(ParallelConfigError, match="joint_query of shape"):
        joint = [t[:, :3] for t in tensors(4)]
        attention(query, key, value, joint_query=joint[0].repeat(1, 1, 2, 1),
                  joint_key=joint[1], joint_value=joint[2])  # fmt: skip
    with pytest.raises(ParallelConfigError, match="cu_seqlens_kv without cu_seqlens"):
        attention(query, key, value, cu_seqlens_kv=[0, 5, 12])
    with pytest.raises(ParallelConfigError, match="2 documents and cu_seqlens_kv of 1"):
        attention(query, key, value, cu_seqlens=[0, 5, 12], cu_seqlens_kv=[0, 12])


def test_what_would_not_be_right_is_refused() -> None:
    run_ranks(2, refused)


def keeps_its_key_layout() -> None:
    rank, zigzag = dist.get_rank(), SequenceLayout.zigzag(S, 2)
    contiguous = SequenceLayout.contiguous(S, 2)
    query, key, value = tensors(2)
    attention = UlyssesAttention(dist.group.WORLD, zigzag, kv_sequence_layout=zigzag)

    def own(tensor: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        return torch.cat([tensor[:, a:b] for a, b in layout.chunks[rank]], 1)

    out = attention(
        own(query, contiguous), own(key, zigzag), own(value, zigzag),
        causal=True, sequence_layout=contiguous,
    )  # fmt: skip
    right = own(oracle(*(t.double() for t in (query, key, value)), causal=True), contiguous)
    torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-5)


def test_a_call_with_another_query_layout_keeps_the_modules_for_keys() -> None:
    run_ranks(2, keeps_its_key_layout)
