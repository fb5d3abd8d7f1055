"""What a batch and its options may be, checked before anything is cut or filled in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from numbers import Integral
from typing import Any

import torch

from .parallel_state.errors import ParallelConfigError


def nonnegative_dim(tensor: torch.Tensor, dim: int) -> int | None:
    """`dim` counted from the front of this tensor, -1 being its last; None if it lacks it."""
    return dim % tensor.dim() if -tensor.dim() <= dim < tensor.dim() else None


def check_dim(what: str, tensor: torch.Tensor, dim: int) -> None:
    """Refuses a dim that the tensor does not have."""
    if nonnegative_dim(tensor, dim) is None:
        raise ParallelConfigError(
            f"{what} of shape {list(tensor.shape)} along dim {dim}.",
            rule="the tensor has the sequence dim",
            nearest=f"a dim of {-tensor.dim()} to {tensor.dim() - 1}."
            if tensor.dim()
            else "a tensor with a dim of tokens, as [s] or [b, s].",
        )


def check_names(option: str, names: Iterable[str], batch: Mapping[str, Any]) -> None:
    """Refuses an option for an entry that the batch does not have."""
    for name in (names,) if isinstance(names, str) else names:
        if name not in batch:
            known = [str(key) for key in batch]
            near = get_close_matches(str(name), known, n=1, cutoff=0.5)
            raise ParallelConfigError(
                f"{option} names {name!r}, which the batch does not have.",
                f"It has {', '.join(map(repr, known)) or 'nothing'}.",
                f"{option} speaks of entries of the batch; what it says of another would be lost",
                f"{near[0]!r}." if near else f"no {name!r} in {option}.",
            )


def check_holds(request: str, dtype: torch.dtype, value: float, option: str) -> None:
    """Refuses to fill in what the dtype turns into another value: -100 is 156 in uint8.

    Args:
        request: for the error, what was asked for; `option` what works as well as another dtype.
    """
    if dtype.is_complex or (dtype.is_floating_point and value in (float("inf"), -float("inf"))):
        return
    if dtype.is_floating_point:
        least, most = torch.finfo(dtype).min, torch.finfo(dtype).max
        fits = value != value or least <= value <= most
    else:
        bounds = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        least, most = bounds
        fits = least <= value <= most and value == int(value)
    if not fits:
        floats = dtype.is_floating_point or value != value // 1
        whole = "" if dtype.is_floating_point else "whole numbers from "
        raise ParallelConfigError(
            request,
            f"{dtype} holds {whole}{least} to {most}.",
            "what is filled in is a value of the tensor's dtype, or it would become another one",
            f"the tensor as {torch.float32 if floats else torch.int64}; or {option}.",
        )


def check_count(what: str, value: Any, unit: str) -> None:
    """Refuses a number that is no count of one or more."""
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 1:
        raise ParallelConfigError(
            f"{what} is {value!r}.",
            rule=f"{what} is a whole number of {unit}, 1 or more",
            nearest=f"{what} 1.",
        )


def check_positions(position_ids: torch.Tensor) -> None:
    """Refuses what are no positions, whose steps of 1 could not be told."""
    dtype, shape = position_ids.dtype, list(position_ids.shape)
    what = ""
    if dtype.is_floating_point:
        what = f"{dtype} rounds positions above {2 / torch.finfo(dtype).eps:.0f}."
    elif dtype == torch.bool or dtype.is_complex:
        what = f"{dtype} is no type of positions."
    elif position_ids.device.type == "meta":
        what = "A tensor on the meta device holds no values."
    elif position_ids.dim() == 0:
        what = "A tensor without dims has no tokens."
    elif position_ids.numel() == 0:
        what = f"It holds no position at all: {' x '.join(map(str, shape))} = 0."
    if what:
        raise ParallelConfigError(
            f"cu_seqlens_from_position_ids of a tensor of shape {shape} and dtype {dtype}.",
            what,
            "position_ids are whole numbers over the whole sequence, [s] or [b, s], of one token "
            "at least",
            "int64 positions, never rounded to a floating-point type."
            if dtype.is_floating_point
            else "an int64 tensor of shape [s] on the CPU.",
        )
