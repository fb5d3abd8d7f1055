"""Counts collectives and the bytes that this rank sends to and receives from each peer.

torch's CommDebugMode counts point-to-point messages as zero, and no bytes. Here every entry is
seen where all roads meet: each call of torch.distributed, functional collective, DDP or FSDP
goes through the dispatcher as an operator of the namespace `c10d` or `_c10d_functional`. An
operator that this file does not know is an error, never zero bytes.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

Bytes = dict[int, int]  # rank in the group -> bytes


class Wire(TorchDispatchMode):
    """What went over the wire while this was active, forward and backward.

    Bytes are what the operation must move and are independent of the algorithm: nothing to
    oneself; an all-reduce of n bytes is a reduce-scatter and an all-gather, 2n/P to each peer.

    Attributes:
        exchanges: calls that move data; one `batch_isend_irecv` is one, whatever it holds, and so
            are single messages that are all under way before any of them is waited for.
        by_entry: exchanges by entry ("all_to_all_single", "batch_isend_irecv", "messages", ...).
        messages: transfers to and from single peers with at least a byte.
        sent, received: bytes by global rank of the peer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_entry: Counter[str] = Counter()
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.messages = 0
        self._in_batch = False
        self._under_way = False  # single messages that nobody has waited for

    @property
    def exchanges(self) -> int:
        return sum(n for entry, n in self.by_entry.items() if entry != "barrier")

    @property
    def bytes_sent(self) -> int:
        return sum(self.sent.values())

    @property
    def bytes_received(self) -> int:
        return sum(self.received.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        space, name = schema.name.split("::")
        if name in ("wait_tensor", "check_for_nan", "_wrap_tensor_autograd"):
            return
        known = _ENTRIES.get(f"{space}::{name.removesuffix('_out')}")
        if known is None:
            raise NotImplementedError(f"tests/support/wire.py does not count {schema}")
        entry, traffic = known
        named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        group = _group(named)
        sent, received = traffic(named, group.rank(), group.size())
        if entry != "messages":
            self.by_entry[entry] += 1
        elif not self._in_batch:
            if not self._under_way:
                self.by_entry[entry] += 1
            self._under_way = True
        ranks = dist.get_process_group_ranks(group)
        for counter, peers in ((self.sent, sent), (self.received, received)):
            for peer, size in peers.items():
                if ranks[peer] != dist.get_rank() and size:
                    counter[ranks[peer]] += size
                    self.messages += 1

    def _batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def batch_isend_irecv(*args: Any, **kwargs: Any) -> Any:
            self.by_entry["batch_isend_irecv"] += 1
            self._in_batch = True
            try:
                return original(*args, **kwargs)
            finally:
                self._in_batch = False

        return batch_isend_irecv

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            self._under_way = False
            return original(*args, **kwargs)

        return wait


@contextlib.contextmanager
def count_wire() -> Iterator[Wire]:
    """`with count_wire() as wire: ...` on one rank; counts this thread and its backward passes."""
    wire, original, wait = Wire(), distributed_c10d.batch_isend_irecv, dist.Work.wait
    replacement = wire._batch(original)
    # Wherever it was imported to by name, too.
    places = [
        (module, name)
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if value is original
    ]
    try:
        dist.Work.wait = wire._wait(wait)
        for module, name in places:
            setattr(module, name, replacement)
        with wire:
            yield wire
    finally:
        dist.Work.wait = wait
        for module, name in places:
            setattr(module, name, original)


def _group(named: dict[str, Any]) -> Any:
    if "process_group" in named:
        return dist.ProcessGroup.unbox(named["process_group"])
    name = named["group_name"]
    return distributed_c10d._resolve_process_group(name) if isinstance(name, str) else name


def _size(tensors: Any) -> int:
    """Bytes of a tensor, or of all in a nested list."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_size(t) for t in tensors)


def _rows(tensor: Tensor, splits: Sequence[int], size: int) -> Bytes:
    """Bytes per peer of a tensor cut along dim 0; no splits means equal ones."""
    if not splits:
        return dict.fromkeys(range(size), _size(tensor) // size)
    row = _size(tensor) // max(1, tensor.size(0))
    return {peer: length * row for peer, length in enumerate(splits)}


def _each(peer_bytes: int, size: int) -> Bytes:
    return dict.fromkeys(range(size), peer_bytes)


# One function per pattern: (named arguments, my rank, group size) -> bytes sent, received.


def _all_to_all_base(a: dict[str, Any], _: int, size: int) -> tuple[Bytes, Bytes]:
    return (
        _rows(a["input"], a["input_split_sizes"], size),
        _rows(a["output"], a["output_split_sizes"], size),
    )


def _all_to_all_functional(a: dict[str, Any], _: int, size: int) -> tuple[Bytes, Bytes]:
    row = _size(a["input"][:1]) if a["input"].size(0) else 0
    sent, received = a["input_split_sizes"], a["output_split_sizes"]
    return {p: n * row for p, n in enumerate(sent)}, {p: n * row for p, n in enumerate(received)}


def _all_to_all(a: dict[str, Any], *_: int) -> tuple[Bytes, Bytes]:
    sent, received = a["input_tensors"], a["output_tensors"]
    return {p: _size(t) for p, t in enumerate(sent)}, {p: _size(t) for p, t in enumerate(received)}


def _send(a: dict[str, Any], *_: int) -> tuple[Bytes, Bytes]:
    return {a["dst"]: _size(a.get("tensors", a.get("tensor")))}, {}


def _recv(a: dict[str, Any], *_: int) -> tuple[Bytes, Bytes]:
    return {}, {a["src"]: _size(a.get("tensors", a.get("tensor")))}


def _all_gather(outputs: str, inputs: str) -> Callable[..., tuple[Bytes, Bytes]]:
    def traffic(a: dict[str, Any], _: int, size: int) -> tuple[Bytes, Bytes]:
        sent = _each(_size(a[inputs]), size)
        whole = a.get(outputs)
        if isinstance(whole, list) and isinstance(whole[0], list):  # per tensor, per peer
            return sent, {peer: sum(_size(t[peer]) for t in whole) for peer in range(size)}
        return sent, _each(_size(whole) // size, size) if whole is not None else sent

    return traffic


def _reduce_scatter(inputs: str) -> Callable[..., tuple[Bytes, Bytes]]:
    def traffic(a: dict[str, Any], rank: int, size: int) -> tuple[Bytes, Bytes]:
        whole = a[inputs]
        if isinstance(whole, list) and isinstance(whole[0], list):
            sent = {peer: sum(_size(t[peer]) for t in whole) for peer in range(size)}
        else:
            sent = _each(_size(whole) // size, size)
        return sent, _each(sent[rank], size)

    return traffic


def _all_reduce(tensors: str) -> Callable[..., tuple[Bytes, Bytes]]:
    def traffic(a: dict[str, Any], _: int, size: int) -> tuple[Bytes, Bytes]:
        each = _each(2 * _size(a[tensors]) // size, size)
        return each, each

    return traffic


def _rooted(
    tensors: str, root: str, *, from_root: bool, of_root: str | None = None
) -> Callable[..., tuple[Bytes, Bytes]]:
    """Broadcast and scatter (from the root), reduce and gather (to it).

    `of_root` names the argument that only the root gives, one piece per peer.
    """

    def traffic(a: dict[str, Any], rank: int, size: int) -> tuple[Bytes, Bytes]:
        if rank != a[root]:
            toward, away = {a[root]: _size(a[tensors])}, {}
        elif of_root is not None and isinstance(a[of_root], list):
            pieces = a[of_root]
            toward, away = {}, {p: sum(_size(t[p]) for t in pieces) for p in range(size)}
        else:
            toward, away = {}, _each(_size(a[tensors]), size)
        return (away, toward) if from_root else (toward, away)

    return traffic


def _nothing(*_: Any) -> tuple[Bytes, Bytes]:
    return {}, {}


_gather_base = _all_gather("output_tensor", "input_tensor")
_ENTRIES: dict[str, tuple[str, Callable[..., tuple[Bytes, Bytes]]]] = {
    "c10d::alltoall_base_": ("all_to_all_single", _all_to_all_base),
    "c10d::alltoall_": ("all_to_all", _all_to_all),
    "c10d::send": ("messages", _send),
    "c10d::recv_": ("messages", _recv),
    "c10d::_allgather_base_": ("all_gather_into_tensor", _gather_base),
    "c10d::allgather_": ("all_gather", _all_gather("output_tensors", "input_tensors")),
    "c10d::allgather_coalesced_": ("all_gather", _all_gather("output_lists", "input_list")),
    "c10d::allgather_into_tensor_coalesced_": (
        "all_gather_into_tensor",
        _all_gather("outputs", "inputs"),
    ),
    "c10d::_reduce_scatter_base_": ("reduce_scatter_tensor", _reduce_scatter("input_tensor")),
    "c10d::reduce_scatter_": ("reduce_scatter", _reduce_scatter("input_tensors")),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor", _reduce_scatter("inputs")),
    "c10d::allreduce_": ("all_reduce", _all_reduce("tensors")),
    "c10d::allreduce_coalesced_": ("all_reduce", _all_reduce("tensors")),
    "c10d::broadcast_": ("broadcast", _rooted("tensors", "root_rank", from_root=True)),
    "c10d::reduce_": ("reduce", _rooted("tensors", "root_rank", from_root=False)),
    "c10d::scatter_": (
        "scatter",
        _rooted("output_tensors", "root_rank", from_root=True, of_root="input_tensors"),
    ),
    "c10d::gather_": (
        "gather",
        _rooted("input_tensors", "root_rank", from_root=False, of_root="output_tensors"),
    ),
    "c10d::barrier": ("barrier", _nothing),
    "c10d::monitored_barrier_": ("barrier", _nothing),
    "_c10d_functional::all_to_all_single": ("all_to_all_single", _all_to_all_functional),
    "_c10d_functional::isend": ("messages", _send),
    "_c10d_functional::irecv": ("messages", _recv),
    "_c10d_functional::broadcast": ("broadcast", _rooted("input", "src", from_root=True)),
    "_c10d_functional::broadcast_": ("broadcast", _rooted("input", "src", from_root=True)),
}
for _suffix, _argument in (("", "input"), ("_coalesced", "inputs")):
    _space = "_c10d_functional::"
    _gather = _all_gather("absent", _argument)
    _ENTRIES[f"{_space}all_gather_into_tensor{_suffix}"] = ("all_gather_into_tensor", _gather)
    _scatter = _reduce_scatter(_argument)
    _ENTRIES[f"{_space}reduce_scatter_tensor{_suffix}"] = ("reduce_scatter_tensor", _scatter)
    for _in_place in ("", "_"):
        _reduce = _all_reduce(_argument)
        _ENTRIES[f"{_space}all_reduce{_suffix}{_in_place}"] = ("all_reduce", _reduce)
