"""Runs draws on the ranks of a pool: each tensor-parallel rank in turn, on one Ulysses group."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from tests.fuzz.draws import Draw
from tests.fuzz.tensors import (
    GRADIENT,
    QKV,
    layouts,
    options,
    own_attention,
    tensor_parallel_slice,
    whole_tensors,
)
from tests.support.sharded import WHOLE
from tests.support.wire import count_wire
from ulysses_mc import HeadLayout, SequenceLayout
from ulysses_mc.layers import UlyssesAttention
from ulysses_mc.layers.local import flex_attention, sdpa_attention

LOCAL = {"sdpa": sdpa_attention, "flex": flex_attention, "own": own_attention}


def run_draws(draws: Sequence[Draw]) -> list[list[dict[str, Tensor]]]:
    """For each draw and tensor-parallel rank what this rank got; joint tokens apart."""
    results = {}
    # FlexAttention would compile every shape anew, for more than a second.
    uncompiled = patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with warnings.catch_warnings(), uncompiled:
        warnings.simplefilter("ignore", UserWarning)  # that heads are uneven
        for draw in draws:
            if not draw.counted:
                results[draw] = run_draw(draw)
        with count_wire() as wire:  # once: it looks through all modules
            for draw in draws:
                if draw.counted:
                    before = wire.bytes_sent, wire.bytes_received, wire.exchanges
                    results[draw] = run_draw(draw)
                    after = wire.bytes_sent, wire.bytes_received, wire.exchanges
                    check_wire(draw, *(a - b for a, b in zip(after, before, strict=True)))
    return [results[draw] for draw in draws]


def run_draw(draw: Draw) -> list[dict[str, Tensor]]:
    tensors = whole_tensors(draw)
    with torch.set_grad_enabled(draw.local != "flex"):
        return [
            attend(draw, tensor_parallel_slice(draw, rank, tensors)) for rank in range(draw.tensor)
        ]


def attend(draw: Draw, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's output and gradients; shares of what every rank holds."""
    group, rank = dist.group.WORLD, dist.get_rank()
    layout, kv_layout = layouts(draw)
    leaves, given = {}, {name: o for name, o in options(draw).items() if o is not None}
    for name, cut in zip(QKV, (layout, kv_layout, kv_layout), strict=True):
        joint, split = split_joint(draw, tensors[name])
        leaves[name] = in_order(cut.shard(split, -3, rank), draw.inputs).requires_grad_()
        if draw.joint:
            leaves["joint_" + name] = in_order(joint, draw.inputs).requires_grad_()
    for name in WHOLE.keys() & tensors.keys():
        leaves[name] = tensors[name].clone().requires_grad_()
    if "attention_mask" in tensors:
        given["attention_mask"] = tensors["attention_mask"]
    attention = UlyssesAttention(
        group,
        None if draw.no_layout else layout,
        kv_sequence_layout=None if draw.kv_layout is None else kv_layout,
        local_attention=LOCAL[draw.local],
        transport=draw.transport,
    )
    position = "front" if draw.joint_front else "rear"
    outputs = attention(**leaves, joint_position=position, **given)
    outputs = outputs if draw.joint else (outputs,)
    results = dict(zip(("out", "joint_out"), (out.detach() for out in outputs), strict=False))
    if draw.local == "flex":
        return results
    joint, split = split_joint(draw, tensors["grad_out"])
    gradients = [as_gradient(draw, layout.shard(split, -3, rank))]
    if draw.joint:  # the loss on joint tokens is counted once
        counts = rank == draw.seed % group.size()
        gradients.append(in_order(joint if counts else torch.zeros_like(joint), "plain"))
    # Slopes and sinks of documents without a token are not in the graph.
    grads = torch.autograd.grad(outputs, list(leaves.values()), gradients, materialize_grads=True)
    names = [WHOLE.get(name, name) for name in leaves]
    return results | dict(zip(names, grads, strict=True))


def whole_again(draw: Draw, results: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """All Ulysses ranks' results of one tensor-parallel rank, as one process has them."""
    layout, kv_layout = layouts(draw)
    together: dict[str, Tensor] = {}
    for name in results[0]:
        parts = [result[name] for result in results]
        if name in ("out", "query"):
            together[name] = layout.unshard(parts, -3)
        elif name in ("key", "value"):
            together[name] = kv_layout.unshard(parts, -3)
        elif name == "joint_out":
            assert all(torch.equal(part, parts[0]) for part in parts), "joint out differs"
            together[name] = parts[0]
        else:
            together[name] = torch.stack(parts).sum(0)
    for name in ("out", *QKV):
        joint = together.pop("joint_" + name, None)
        if joint is not None:
            pair = [joint, together[name]] if draw.joint_front else [together[name], joint]
            together[name] = torch.cat(pair, -3)
    return together


def split_joint(draw: Draw, tensor: Tensor) -> tuple[Tensor, Tensor]:
    split = tensor.size(-3) - draw.joint
    if draw.joint_front:
        return tensor.narrow(-3, 0, draw.joint), tensor.narrow(-3, draw.joint, split)
    return tensor.narrow(-3, split, draw.joint), tensor.narrow(-3, 0, split)


def in_order(tensor: Tensor, order: str) -> Tensor:
    """A copy that lies otherwise in memory."""
    if order == "fused":  # as a slice of one projection
        return torch.cat([tensor, tensor], -1)[..., : tensor.size(-1)]
    dims = list(range(tensor.dim()))
    if order == "tokens first" and tensor.dim() == 4:
        dims[0], dims[1] = 1, 0
    elif order == "heads first":
        dims[-3], dims[-2] = dims[-2], dims[-3]
    elif order == "reversed":
        dims.reverse()
    return tensor.permute(dims).clone(memory_format=torch.contiguous_format).permute(dims)


def as_gradient(draw: Draw, gradient: Tensor) -> Tensor:
    if draw.gradient == "expanded":  # as from `out.sum().backward()`
        return gradient.new_full((), GRADIENT).expand(gradient.shape)
    return in_order(gradient, draw.gradient)


def check_wire(draw: Draw, sent: int, received: int, exchanges: int) -> None:
    """The tokens that a rank lacks of the heads it owns, nothing twice, in one exchange each way.

    Messages need no exchange where a rank has nothing to send and to receive.
    """
    rank, size = dist.get_rank(), draw.ulysses
    h, k = draw.heads // draw.tensor, max(draw.kv_heads // draw.tensor, 1)
    heads = HeadLayout(h, k, size)
    layout, kv_layout = layouts(draw)
    q_heads = (layout, heads.query_heads)
    kv_heads = (kv_layout, heads.kv_heads)
    joint = (SequenceLayout.from_lengths([draw.joint] * size), heads.query_heads)
    there = [(*q_heads, draw.head_dim), (*kv_heads, draw.head_dim), (*kv_heads, draw.value_dim)]
    back = [(*q_heads, draw.value_dim), (*joint, draw.value_dim)]

    def elements(tensors: list[tuple[Any, ...]]) -> tuple[int, int]:
        """Sent and received by this rank when the sequence is gathered; reversed on the way back"""
        away = arrived = 0
        for cut, owned, dim in tensors:
            for peer in set(range(size)) - {rank}:
                away += cut.lengths[rank] * len(owned[peer]) * dim
                arrived += cut.lengths[peer] * len(owned[rank]) * dim
        return away, arrived

    passes = [elements(there), elements(back)[::-1], elements(back), elements(there)[::-1]]
    unit = draw.tensor * (draw.batch or 1) * getattr(torch, draw.dtype).itemsize
    assert sent == unit * sum(away for away, _ in passes), "bytes sent"
    assert received == unit * sum(arrived for _, arrived in passes), "bytes received"
    needed = draw.tensor * sum(any(moved) for moved in passes)
    most = draw.tensor * (4 if size > 1 else 0)
    allowed = {"p2p": {needed}, "all_to_all": {most}, "auto": {needed, most}}[draw.transport]
    assert exchanges in allowed, f"{exchanges} exchanges, not {allowed}"
