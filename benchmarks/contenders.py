"""Our exchange, the floor it is measured by, and other libraries doing the same.

A contender is built for a case and gives `step(q, k, v) -> out` on this rank's [b, s_r, ., d].
Each gets the local attention in the memory order that it likes best.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .cases import Attention, Case, Prepared, sdpa

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Wrap = Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]


class Refused(Exception):
    """The contender cannot run the case; the message says why."""


def local_attention(case: Case, wrap: Wrap) -> Attention:
    """[b, s, h, d] -> [b, s, h, d]; `wrap` keeps it out of the count of copies."""
    return wrap(Prepared() if case.attention == "none" else sdpa)


# -- ours ----------------------------------------------------------------------------------------


def ours(transport: str = "auto") -> Callable[[Case, dist.ProcessGroup, Wrap], Step]:
    def build(case: Case, group: dist.ProcessGroup, wrap: Wrap) -> Step:
        from ulysses_mc.layers import UlyssesAttention

        attention = local_attention(case, wrap)
        return UlyssesAttention(
            group,
            num_heads=case.heads,
            num_kv_heads=case.kv_heads,
            local_attention=lambda q, k, v, causal: attention(q, k, v),
            transport=transport,
        )

    return build


# -- the floor -----------------------------------------------------------------------------------


class _Bare(torch.autograd.Function):
    """all_to_all_single of prepared buffers: `pairs` of (send, receive); the mirror backward.

    Returns prepared `results`, and prepared `gradients` for the inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, exchange: _PreparedExchange, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        exchange.run(forward=True)
        return tuple(result.detach() for result in exchange.results)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[Any, ...]:
        ctx.exchange.run(forward=False)
        return (None, *ctx.exchange.gradients)


class _PreparedExchange:
    """Buffers of an exchange of all `heads` lists (per rank), packed already and reused.

    Args:
        heads: for each collective, how many heads each rank holds by heads.
        to_heads: whether forward gathers the sequence.
    """

    def __init__(
        self,
        case: Case,
        group: dist.ProcessGroup,
        heads: list[list[int]],
        to_heads: bool,
        results: list[torch.Size],
        gradients: list[torch.Size],
    ) -> None:
        self.group, self.to_heads = group, to_heads
        rows = case.batch_size * case.local_tokens * case.head_dim
        rank, ranks = group.rank(), range(group.size())
        self.collectives = []
        for per_rank in heads:
            by_sequence = [rows * per_rank[peer] for peer in ranks]
            by_heads = [rows * per_rank[rank]] * len(ranks)
            buffers = torch.randn(sum(by_sequence)), torch.randn(sum(by_heads))
            self.collectives.append((buffers, by_sequence, by_heads))
        self.results = [torch.randn(shape) for shape in results]
        self.gradients = [torch.randn(shape) for shape in gradients]

    def run(self, forward: bool) -> None:
        for (by_sequence, by_heads), sequence_counts, head_counts in self.collectives:
            send = (by_sequence, sequence_counts), (by_heads, head_counts)
            if forward != self.to_heads:
                send = send[::-1]
            (source, sent), (target, received) = send
            dist.all_to_all_single(target, source, received, sent, group=self.group)


def floor(separate: bool = False) -> Callable[[Case, dist.ProcessGroup, Wrap], Step]:
    """Bare collectives of prepared buffers: one for QKV, or one each for Q, K and V."""

    def build(case: Case, group: dist.ProcessGroup, wrap: Wrap) -> Step:
        layout, rank = case.layout, group.rank()
        query = [len(run) for run in layout.query_heads]
        kv = [len(run) for run in layout.kv_heads]
        tokens = case.local_tokens * case.ranks

        def shape(length: int, heads: int) -> torch.Size:
            return torch.Size((case.batch_size, length, heads, case.head_dim))

        grouped = [[q + 2 * n for q, n in zip(query, kv, strict=True)]]
        by_heads = [shape(tokens, n) for n in (query[rank], kv[rank], kv[rank])]
        by_sequence = [
            shape(case.local_tokens, n) for n in (case.heads, case.kv_heads, case.kv_heads)
        ]
        first = _PreparedExchange(
            case, group, [query, kv, kv] if separate else grouped, True, by_heads, by_sequence
        )
        last = _PreparedExchange(case, group, [query], False, by_sequence[:1], by_heads[:1])
        attention = local_attention(case, wrap)

        def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            (out,) = _Bare.apply(last, attention(*_Bare.apply(first, q, k, v)))
            return out

        return step

    return build


# -- other libraries -----------------------------------------------------------------------------


def _need(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise Refused(f"{module} is not installed: pip install 'ulysses-mc[bench]'")


def deepspeed(case: Case, group: dist.ProcessGroup, wrap: Wrap) -> Step:
    """DeepSpeed's DistributedAttention in its default order [s, b, h, d]."""
    _need("deepspeed")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.comm
    import deepspeed.ops
    from deepspeed.sequence.layer import DistributedAttention

    # Its shared-memory all-reduce, which no all-to-all uses, would be compiled first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    attention = local_attention(case, wrap)

    def sequence_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(*(t.transpose(0, 1) for t in (q, k, v))).transpose(0, 1)

    layer = DistributedAttention(sequence_first, group, scatter_idx=2, gather_idx=0)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer(*(t.transpose(0, 1) for t in (q, k, v)), 1)
        return out.transpose(0, 1)

    return step


def yunchang(case: Case, group: dist.ProcessGroup, wrap: Wrap) -> Step:
    """yunchang's UlyssesAttention, its kernel replaced by the local attention."""
    _need("yunchang")
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    if case.kv_heads % case.ranks:
        raise Refused(f"{case.kv_heads} key/value heads do not divide by {case.ranks} ranks")
    layer = UlyssesAttention(group, attn_type=AttnType.TORCH_MATH)
    attention = local_attention(case, wrap)
    layer.attn_fn = lambda q, k, v, **_: attention(q, k, v)
    return layer


def yunchang_packed(case: Case, group: dist.ProcessGroup, wrap: Wrap) -> Step:
    """yunchang's LongContextAttentionQKVPacked without ring; it is given q, k, v stacked already.

    What stacking costs a model without a fused projection is left out, in its favour.
    """
    _need("yunchang")
    from yunchang import LongContextAttentionQKVPacked
    from yunchang.globals import PROCESS_GROUP

    if case.kv_heads != case.heads:
        raise Refused("q, k and v in one tensor need equal head counts")
    PROCESS_GROUP.ULYSSES_PG = group
    layer = LongContextAttentionQKVPacked()
    if case.attention == "none":
        prepared = wrap(Prepared())

        def packed(qkv: torch.Tensor) -> torch.Tensor:
            return prepared(qkv, out_shape=(*qkv.shape[:2], *qkv.shape[3:]))
    else:
        packed = wrap(lambda qkv: sdpa(*qkv.unbind(2)))
    layer.ring_attn_fn = lambda qkv, **_: packed(qkv)
    return _StackOnce(layer)


class _StackOnce:
    """Stacks q, k, v outside the timed part."""

    def __init__(self, layer: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.layer = layer

    def prepare(self, *qkv: torch.Tensor) -> list[torch.Tensor]:
        return [torch.stack([t.detach() for t in qkv], 2).requires_grad_()]

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        return self.layer(qkv)


def ringmaster(own_gloo_path: bool) -> Callable[[Case, dist.ProcessGroup, Wrap], Step]:
    """axolotl-ringmaster's attention function for Hugging Face models, [b, h, s, d].

    Over gloo it emulates all-to-all by gathering everything everywhere. Its path for NCCL, which
    uses all_to_all_single, runs over gloo as well when it is told that the backend is another.
    """

    def build(case: Case, group: dist.ProcessGroup, wrap: Wrap) -> Step:
        _need("ringmaster", "transformers")
        import ringmaster.comm
        from ringmaster import CPRuntime, RingmasterConfig, set_runtime
        from ringmaster.strategies.ulysses import make_ulysses_attention
        from transformers import AttentionInterface

        prepared = wrap(Prepared())
        base = wrap(sdpa)

        def inner(_: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *__: Any, **___: Any):
            if case.attention == "none":
                b, h, s, d = q.shape
                return prepared(q, k, v, out_shape=(b, s, h, d)), None
            return base(*(t.transpose(1, 2) for t in (q, k, v))), None

        AttentionInterface.register("benchmark", inner)
        attend = make_ulysses_attention("benchmark")
        module = torch.nn.Module()
        runtime = CPRuntime(RingmasterConfig(), ulysses_group=group, cp_group=group)
        backend = dist if own_gloo_path else _NotGloo()

        def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            AttentionInterface.register("benchmark", inner)
            set_runtime(runtime)
            ringmaster.comm.dist = backend
            out, _ = attend(module, *(t.transpose(1, 2) for t in (q, k, v)), None)
            return out

        return step

    return build


class _NotGloo:
    """torch.distributed, but for the name of the backend."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def get_backend(self, group: dist.ProcessGroup | None = None) -> str:
        return "nccl"


FLOOR = "floor"
CONTENDERS: dict[str, Callable[[Case, dist.ProcessGroup, Wrap], Step]] = {
    FLOOR: floor(),
    "separate, no copy": floor(separate=True),
    "ulysses_mc": ours(),
    "ulysses_mc (all_to_all)": ours("all_to_all"),
    "DeepSpeed": deepspeed,
    "yunchang": yunchang,
    "yunchang (packed)": yunchang_packed,
    "ringmaster (gloo path)": ringmaster(own_gloo_path=True),
    "ringmaster (NCCL path)": ringmaster(own_gloo_path=False),
}
OURS = ("ulysses_mc", "ulysses_mc (all_to_all)")
NOT_PEERS = (FLOOR, "separate, no copy", *OURS)
