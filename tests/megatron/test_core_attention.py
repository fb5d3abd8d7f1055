"""UlyssesCoreAttention as Megatron builds it, against attention in float64 on one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron.small_gpt import Setting
from tests.support import oracle
from tests.support.pool import run_ranks
from ulysses_mc import ParallelConfigError, SequenceLayout, megatron_on_cpu

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")

S, B, D = 16, 2, 4  # tokens, sequences, head dimension


@dataclass(frozen=True)
class Case:
    tp: int
    cp: int
    heads: int
    kv_heads: int
    core: Any = "DotProductAttention"
    mask: str = "none"  # none, whole, rows: how a mask that hides the first key is given
    window: tuple[int, int] | None = None
    bias: bool = False
    sinks: bool = False
    off_by_one: bool = False  # of Megatron's softmax: a sink of 0 in every head, not learned
    bounds: tuple[int, ...] | None = None  # packed documents
    value_dim: int = D
    mask_type: str = "causal"  # Megatron's AttnMaskType
    tolerance: float = 1e-10

    @property
    def ranks(self) -> int:
        return self.tp * self.cp

    @property
    def softmax_type(self) -> str:
        if self.off_by_one:
            return "off-by-one"
        return "learnable" if self.sinks else "vanilla"


def build_core(case: Case, **config: Any) -> Any:
    """The core attention of one layer, as Megatron's attention layers build it."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    from ulysses_mc.layers import UlyssesCoreAttention

    values = dict(
        num_layers=1,
        hidden_size=case.heads * D,
        num_attention_heads=case.heads,
        num_query_groups=case.kv_heads,
        window_size=case.window,
        params_dtype=torch.float64,
        softmax_type=case.softmax_type,
    )
    return build_module(
        ModuleSpec(module=UlyssesCoreAttention, params={"core": core_of(case.core)}),
        config=Setting(tp=case.tp, cp=case.cp, config=values | config).transformer_config(),
        layer_number=1,
        attn_mask_type=AttnMaskType[case.mask_type],
        attention_type="self",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        softmax_scale=0.3,
        **({} if case.value_dim == D else dict(k_channels=D, v_channels=case.value_dim)),
    )


def core_of(name: Any) -> Any:
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    if not isinstance(name, str):
        return name
    if name == "TEDotProductAttention":
        return transformer_engine.TEDotProductAttention
    return DotProductAttention if name == "DotProductAttention" else name


def whole_inputs(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    batch = 1 if case.bounds else B

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    inputs = {
        "query": draw(batch, S, case.heads, D),
        "key": draw(batch, S, case.kv_heads, D),
        "value": draw(batch, S, case.kv_heads, case.value_dim),
        "gradient": draw(batch, S, case.heads, case.value_dim),
    }
    if case.bias:
        inputs["bias"] = draw(1, case.heads, S, S)
    if case.sinks:
        inputs["sinks"] = draw(case.heads)
    return inputs


def hidden_first_key() -> torch.Tensor:
    """[1, 1, S, S], True = masked out: the future, and the first key for all but the first."""
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    hidden[1:, 0] = True
    return hidden[None, None]


def right_values(case: Case, inputs: dict[str, torch.Tensor]) -> oracle.Gradients:
    allowed = None if case.mask == "none" else ~hidden_first_key()
    sinks = torch.zeros(case.heads) if case.off_by_one else inputs.get("sinks")
    return oracle.attention_gradients(
        inputs["query"],
        inputs["key"],
        inputs["value"],
        inputs["gradient"],
        causal=case.mask_type != "no_mask",
        scale=0.3,
        allowed=allowed,
        window=case.window,
        bias=inputs.get("bias"),
        sinks=sinks,
        cu_seqlens=case.bounds,
    )


def check_core(*cases: Case) -> None:
    """Cases of one grid, one after another."""
    with megatron_on_cpu():
        Setting(tp=cases[0].tp, cp=cases[0].cp).initialize()
        for case in cases:
            try:
                compare(case, build_core(case))
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from error


def compare(case: Case, core: Any) -> None:
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    cp_rank = parallel_state.get_context_parallel_rank()
    layout = SequenceLayout.zigzag_packed(case.bounds or (0, S), case.cp)
    inputs = whole_inputs(case)
    right = right_values(case, inputs)

    def own(tensor: torch.Tensor) -> torch.Tensor:  # [b, S, H, d] -> [s_r, b, h, d]
        tensor = layout.shard(tensor, 1, cp_rank).chunk(case.tp, 2)[tp_rank].transpose(0, 1)
        return (tensor.squeeze(1) if case.bounds else tensor).contiguous()

    leaves = [own(inputs[name]).requires_grad_() for name in ("query", "key", "value")]
    options: dict[str, Any] = {}
    mask = None if case.mask == "none" else hidden_first_key()
    if mask is not None and case.mask == "rows":
        mask = layout.shard(mask, 2, cp_rank)
    if case.bias:
        options["attention_bias"] = inputs["bias"].chunk(case.tp, 1)[tp_rank]
    if case.bounds:
        bounds = torch.tensor(case.bounds, dtype=torch.int32)
        options["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds
        )
    if case.sinks:
        with torch.no_grad():
            core.softmax_offset.weight.copy_(inputs["sinks"].chunk(case.tp)[tp_rank])
    out = core(*leaves, mask, **options)
    out.backward(own(inputs["gradient"]).flatten(-2))
    tolerance = dict(rtol=case.tolerance, atol=case.tolerance)
    torch.testing.assert_close(out, own(right.out).flatten(-2), **tolerance)
    for leaf, gradient in zip(leaves, (right.query, right.key, right.value), strict=True):
        torch.testing.assert_close(leaf.grad, own(gradient), **tolerance)
    if case.sinks:
        assert right.sinks is not None
        gradient = core.softmax_offset.weight.grad
        dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
        torch.testing.assert_close(gradient, right.sinks.chunk(case.tp)[tp_rank], **tolerance)


@pytest.mark.parametrize("core", ["DotProductAttention", "sdpa"])
@pytest.mark.parametrize(
    ("tp", "cp", "heads", "kv_heads"),
    [(1, 2, 4, 4), (2, 2, 8, 4), (1, 4, 8, 2), (1, 2, 6, 3), (1, 4, 7, 7), (1, 4, 3, 1)],
    ids=["even", "tp", "replicated", "irregular", "uneven", "fewer-heads-than-ranks"],
)
@pytest.mark.filterwarnings("ignore:uneven")
def test_heads(core: str, tp: int, cp: int, heads: int, kv_heads: int) -> None:
    case = Case(tp, cp, heads, kv_heads, core)
    run_ranks(case.ranks, check_core, case)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 2, 4, 2, "DotProductAttention", mask="whole"),
        Case(1, 2, 4, 2, "DotProductAttention", mask="rows"),
        Case(1, 2, 4, 2, "sdpa", mask="rows"),
        Case(1, 2, 4, 2, "DotProductAttention", window=(3, 0)),
        Case(1, 2, 4, 2, "sdpa", window=(3, 0)),
        Case(2, 2, 4, 4, "sdpa", bias=True),
        Case(2, 2, 8, 4, "sdpa", sinks=True),
        Case(2, 2, 8, 4, "DotProductAttention", sinks=True),
        Case(1, 2, 4, 2, "sdpa", bounds=(0, 4, 12, 16)),
        Case(1, 2, 4, 2, "DotProductAttention", mask_type="no_mask"),
        Case(1, 2, 4, 2, "sdpa", mask_type="no_mask"),
        Case(1, 2, 4, 2, "DotProductAttention", off_by_one=True),
        Case(1, 2, 4, 4, "DotProductAttention", value_dim=3),
        Case(1, 2, 4, 4, "sdpa", value_dim=3),
    ],
    ids=str,
)
def test_masks_and_what_else_is_cut(case: Case) -> None:
    run_ranks(case.ranks, check_core, case)


def identity_at_one_rank() -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    with megatron_on_cpu():
        Setting().initialize()
        assert type(build_core(Case(1, 1, 4, 4))) is DotProductAttention
        compare(Case(1, 1, 4, 4, "sdpa"), build_core(Case(1, 1, 4, 4, "sdpa")))


def test_one_rank_keeps_the_core_of_the_spec() -> None:
    run_ranks(1, identity_at_one_rank)


def refused(case: Case, config: dict[str, Any], says: str) -> None:
    with megatron_on_cpu():
        Setting(tp=case.tp, cp=case.cp).initialize()
        with pytest.raises(ParallelConfigError, match=says):
            build_core(case, **config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (dict(context_parallel_size=1), "context_parallel_size=1 in the config"),
        (dict(qk_clip=True), "qk_clip"),
    ],
    ids=str,
)
def test_what_would_not_be_exact_is_refused_when_built(config: dict[str, Any], says: str) -> None:
    run_ranks(2, refused, Case(1, 2, 4, 4), config, says)


def masks_that_do_not_fit() -> None:
    with megatron_on_cpu():
        Setting(cp=2).initialize()
        core = build_core(Case(1, 2, 4, 4, "sdpa"))
        tensors = [torch.zeros(S // 2, B, 4, D) for _ in range(3)]
        with pytest.raises(ParallelConfigError, match="a row for each query"):
            core(*tensors, torch.zeros(1, 1, 5, S, dtype=torch.bool))
        with pytest.raises(ParallelConfigError, match="every key of the whole sequence"):
            core(*tensors, torch.zeros(1, 1, 1, S // 2, dtype=torch.bool))
        with pytest.raises(ParallelConfigError, match="a row for each query"):
            core(*tensors, attention_bias=torch.zeros(1, 4, S // 2, S))
        with pytest.raises(ParallelConfigError, match="called with x"):
            core(*tensors, x=tensors[0])


def under_autocast(case: Case) -> list[torch.Tensor]:
    """Output and gradients of this rank's float32 tensors (value bfloat16) under autocast."""
    with megatron_on_cpu():
        Setting(tp=case.tp, cp=case.cp).initialize()
        attention = build_core(case, params_dtype=torch.float32)
        rank, layout = dist.get_rank(), SequenceLayout.zigzag(S, case.cp)
        inputs = whole_inputs(case)
        own = [
            layout.shard(inputs[name].transpose(0, 1), 0, rank).to(dtype).requires_grad_()
            for name, dtype in (("query", F32), ("key", F32), ("value", torch.bfloat16))
        ]
        gradient = layout.shard(inputs["gradient"].transpose(0, 1), 0, rank)
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(*own, None)
        assert out.dtype == torch.bfloat16
        out.backward(gradient.flatten(2).bfloat16())
        return [out.detach().double(), *(leaf.grad.double() for leaf in own)]


F32 = torch.float32


@pytest.mark.parametrize("core", ["DotProductAttention", "sdpa"])
def test_autocast_with_ranks_that_hold_no_heads(core: str) -> None:
    case = Case(tp=1, cp=4, heads=2, kv_heads=2, core=core)
    right = right_values(case, whole_inputs(case))
    layout = SequenceLayout.zigzag(S, case.cp)
    ranks = run_ranks(case.ranks, under_autocast, case)
    expected = [right.out.flatten(2), right.query, right.key, right.value]
    for index, whole in enumerate(expected):
        for rank, results in enumerate(ranks):
            part = layout.shard(whole.transpose(0, 1), 0, rank)
            assert (results[index] - part).abs().max() < 0.05 * whole.abs().max()


def test_masks_that_do_not_fit_are_refused_before_any_collective() -> None:
    run_ranks(2, masks_that_do_not_fit)
