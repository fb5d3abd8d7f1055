"""What a CUDA graph needs, seen on CPUs: nothing read on the host, the same work at every step.

A captured graph replays kernels on the memory they had. So, once warmed up, neither pass may wait
for a value, build a tensor from numbers of the host, or do and allocate what depends on the data.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.pool import run_ranks
from tests.support.sharded import draw
from ulysses_mc.layers import UlyssesAttention

B, S, D = 2, 8, 4
HEADS = {"mha": (4, 4), "gqa": (4, 2), "replicated": (4, 1), "uneven": (3, 3), "irregular": (9, 3)}
OPTIONS: dict[str, Any] = {"causal": True, "window": (5, 0)}
_TO_HOST = ("tolist", "numpy", "item", "__array__", "__bool__", "__int__", "__float__", "__index__")
_FROM_HOST = ("aten::lift_fresh",)  # torch.tensor(...)


class _HostCalls(TorchFunctionMode):
    """Methods that read a tensor on the host; `tolist` of a CPU tensor is no operator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.found += [name] * (name in _TO_HOST)
        return func(*args, **(kwargs or {}))


class Work(TorchDispatchMode):
    """All operators in order, with the shapes, strides and memory of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = _HostCalls()
        self.steps: list[tuple[str, tuple[Any, ...]]] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        by_data = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
        if name in _FROM_HOST or any(tag in func.tags for tag in by_data):
            self.waits.append(name)
        made = (t for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        what = [(*t.shape, *t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in made]
        self.steps.append((name, tuple(what)))
        return result

    def __enter__(self) -> Work:
        self.calls.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.calls.__exit__(*error)
        self.waits += self.calls.found


def step(attention: UlyssesAttention, kind: str, seed: int, options: dict[str, Any]) -> Work:
    heads, kv_heads = HEADS[kind]
    length = S // attention.group.size()
    shapes = [(B, length, n, D) for n in (heads, kv_heads, kv_heads, heads)]
    *leaves, grad = (draw(*shape, seed=seed + i) for i, shape in enumerate(shapes))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    with Work() as work:
        torch.autograd.grad(attention(*leaves, **options), leaves, grad)
    return work


def three_steps(transport: str) -> None:
    for kind in HEADS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that heads are uneven
            attention = UlyssesAttention(dist.group.WORLD, transport=transport)
            step(attention, kind, 0, OPTIONS)
        first, second = (step(attention, kind, seed, OPTIONS) for seed in (10, 20))
        assert (first.waits, second.waits) == ([], []), f"{kind}: {first.waits}, {second.waits}"
        assert first.steps == second.steps, kind
        assert {"aten::copy_"} <= {name for name, _ in first.steps} or dist.get_world_size() == 1
        assert any("attention" in name and "backward" in name for name, _ in first.steps)


@pytest.mark.parametrize(("ranks", "transport"), [(1, "auto"), (2, "p2p"), (2, "all_to_all")])
def test_unpacked(ranks: int, transport: str) -> None:
    run_ranks(ranks, three_steps, transport)


def packed_steps() -> None:
    attention = UlyssesAttention(dist.group.WORLD)
    bounds = [0, 3, 8]
    for given, read in ((bounds, False), (torch.tensor(bounds, dtype=torch.int32), True)):
        options = {"causal": True, "cu_seqlens": given}
        step(attention, "gqa", 0, options)
        first, second = (step(attention, "gqa", seed, options) for seed in (10, 20))
        assert set(first.waits) == ({"tolist"} if read else set()), given
        assert first.steps == second.steps
    other = step(attention, "gqa", 10, {"causal": True, "cu_seqlens": [0, 5, 6, 8]})
    assert other.steps != first.steps  # a graph holds the lengths that it was captured with


def test_packed_only_with_lengths_on_the_host() -> None:
    run_ranks(2, packed_steps)
