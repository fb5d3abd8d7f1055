"""Counts the bytes that copies write, in forward and backward passes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that write elements they have read, unchanged. `contiguous`, `reshape`, `to`,
# `flip`, `stack` and their kind arrive here as these.
# fmt: off
_COPIES = {
    "copy_", "copy", "clone", "_to_copy", "cat", "stack", "index", "index_select", "gather", "take",
    "index_copy_", "index_copy", "index_put_", "index_put", "_index_put_impl_", "scatter_",
    "scatter", "masked_select", "masked_scatter", "masked_scatter_", "where", "repeat",
    "repeat_interleave", "roll", "flip", "rot90", "tril", "triu", "constant_pad_nd", "narrow_copy",
    "slice_backward", "select_backward", "unfold_backward", "slice_scatter", "select_scatter",
    "split_copy", "split_with_sizes_copy", "slice_copy", "select_copy", "permute_copy",
    "transpose_copy", "view_copy", "unfold_copy", "expand_copy", "t_copy", "_reshape_copy",
    "_foreach_copy_", "_chunk_cat",
}
# In place, by index: which argument is written.
_SOURCE = {
    "index_copy_": 3, "scatter_": 3, "index_put_": 2, "_index_put_impl_": 2, "masked_scatter_": 2,
}
# fmt: on


class Copies(TorchDispatchMode):
    """What was copied while this was active.

    Attributes:
        bytes: written by copies, outside the parts that do not count.
        by_op: the same by operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_op: Counter[str] = Counter()
        self._paused = 0

    @property
    def bytes(self) -> int:
        return sum(self.by_op.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name in _COPIES and not self._paused:
            self.by_op[name] += _written(name, args, result)
        return result

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Does not count what runs inside. Its backward pass does count: see `uncounted`."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def uncounted(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`function` (a local attention) without counting its copies in either pass.

        Gradients reach the output's node first and leave by the node of the positional inputs,
        so that these two switch counting off and on again.
        """

        def uncounted_function(*inputs: Tensor, **options: Any) -> Tensor:
            inputs = _Enter.apply(self, *inputs)
            with self.paused():
                out = function(*inputs, **options)
            return _Leave.apply(self, out)

        return uncounted_function


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: Copies, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.copies = copies
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.copies._paused -= 1
        return (None, *grads)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: Copies, out: Tensor) -> Tensor:
        ctx.copies = copies
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.copies._paused += 1
        return None, grad


@contextlib.contextmanager
def count_copies() -> Iterator[Copies]:
    """`with count_copies() as copies: ...`; counts backward passes that run inside it, too."""
    with Copies() as copies:
        yield copies
    if copies._paused:
        raise AssertionError("a backward pass entered an uncounted function and did not leave it")


def _written(name: str, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that the operator wrote: its result, or what it put into its first argument."""
    if name in _SOURCE:
        result = args[_SOURCE[name]]
    return _size(args[0] if result is None else result)


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(_size(v) for v in value) if isinstance(value, list | tuple) else 0
