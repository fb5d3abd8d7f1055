"""Row 20: ALiBi slopes and sinks are not cut with the heads."""

from __future__ import annotations

import pytest
import torch

from tests.support.sharded import check_against_oracle, draw, draw_qkv

SLOPES = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)
SINKS = draw(4, seed=5)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("given", ["alibi_slopes", "sinks", "both", "with a mask"])
@pytest.mark.parametrize("packed", [False, True])
def test_each_head_has_its_own_and_gets_its_gradient(tensor_parallel, given, packed) -> None:
    options = {"alibi_slopes": SLOPES, "sinks": SINKS}
    if given in options:
        options = {given: options[given]}
    if given == "with a mask":
        options["attention_mask"] = draw(2, 1, 8, 8, seed=6) > 0
    common = {"cu_seqlens": [0, 3, 8]} if packed else {}
    held = 4 // tensor_parallel
    for rank in range(tensor_parallel):
        mine = slice(rank * held, (rank + 1) * held)
        tensors = tuple(tensor[:, :, mine] for tensor in draw_qkv(2, 8, 4, 4))
        by_head = {n: (t[mine] if t.dim() == 1 else t) for n, t in options.items()}
        check_against_oracle(2, tensors, causal=True, **by_head, **common)


@pytest.mark.parametrize(("heads", "kv", "ranks"), [(7, 7, 4), (6, 3, 2), (8, 1, 4), (2, 2, 4)])
def test_uneven_and_shared_heads(heads, kv, ranks) -> None:
    options = {"alibi_slopes": draw(heads).abs(), "sinks": draw(heads, seed=1)}
    check_against_oracle(ranks, draw_qkv(1, 8, heads, kv), **options)
