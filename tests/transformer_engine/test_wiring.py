"""with_ulysses on Megatron's TransformerEngine specs: what is built, saved, and refused."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.megatron.small_gpt import (
    MLA,
    SEQUENCE,
    Setting,
    gpt_chunks,
    hybrid_chunks,
    local_spec,
    tokens_of,
)
from tests.megatron.test_core_attention import Case, build_core, compare
from tests.support.pool import run_ranks
from ulysses_mc import ParallelConfigError, SequenceLayout, megatron_on_cpu

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(torch.cuda.is_available(), reason="builds models on CPU ranks"),
]
TE = "TEDotProductAttention"
GQA = dict(num_attention_heads=8, num_query_groups=4, qk_layernorm=True)


def stock_spec(config: Any) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs

    return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)


def ready_spec(config: Any) -> Any:
    from ulysses_mc.layers import specs

    return specs.gpt_layer_te_qk_norm


def keys(setting: Setting, spec: Any) -> tuple[list[Any], list[Any]]:
    """Of the plain and of the distributed checkpoint of one rank's model."""
    from megatron.core import parallel_state

    with megatron_on_cpu():
        setting.initialize()
        (model,) = gpt_chunks(setting, spec)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        sharded = model.sharded_state_dict(metadata={"dp_cp_group": group})
        in_file = [(key, value.key) for key, value in sharded.items() if hasattr(value, "key")]
        return sorted(model.state_dict()), sorted(in_file)


@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
def test_checkpoints_have_the_same_keys_with_and_without(softmax_type: str) -> None:
    setting = Setting(config=GQA | dict(softmax_type=softmax_type))
    (right,) = run_ranks(1, keys, setting, stock_spec, timeout=60)
    assert any("core_attention._extra_state" in key for key in right[0])
    for found in run_ranks(2, keys, replace(setting, cp=2), ready_spec, timeout=60):
        for ours, theirs in zip(found, right, strict=True):
            assert set(ours) ^ set(theirs) == set()


def load_each_others(softmax_type: str) -> None:
    """A plain state_dict goes from a model without Ulysses into one with it, and back."""
    config = GQA | dict(softmax_type=softmax_type)
    with megatron_on_cpu():
        setting = Setting(cp=2, config=config)
        setting.initialize()
        (wired,) = gpt_chunks(setting, ready_spec)
        (stock,) = gpt_chunks(Setting(config=config), stock_spec)
        with torch.no_grad():
            for parameter in stock.parameters():
                parameter.normal_()
        wired.load_state_dict(stock.state_dict())
        again = wired.state_dict()
        for name, parameter in stock.state_dict().items():
            if isinstance(parameter, torch.Tensor):
                assert torch.equal(again[name], parameter), name
        stock.load_state_dict(again)
        for name in [name for name in again if name.endswith("core_attention._extra_state")]:
            del again[name]  # from a model without TransformerEngine
        wired.load_state_dict(again)


@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
def test_plain_checkpoints_fit_both_ways(softmax_type: str) -> None:
    run_ranks(2, load_each_others, softmax_type)


def look_inside() -> None:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from ulysses_mc.layers import UlyssesCoreAttention

    config = GQA | dict(deterministic_mode=True, attention_dropout=0.1, window_size=(4, 0))
    with megatron_on_cpu():
        setting = Setting(tp=2, cp=2, config=config)
        setting.initialize()
        (model,) = gpt_chunks(setting, ready_spec)
        cores = [m for m in model.modules() if isinstance(m, UlyssesCoreAttention)]
        assert len(cores) == 4
        for core in cores:
            inner = core.inner
            assert type(inner) is TEDotProductAttention
            assert inner.num_attention_heads // inner.tp_size == 2
            assert inner.num_gqa_groups_per_partition == 1
            assert inner.cp_group is None and inner.cp_stream is None
            assert TEDotProductAttention.cp_stream is None  # none made, none kept
            assert inner.deterministic
            assert inner.window_size == (4, 0)
            assert inner.rng_states_tracker is get_cuda_rng_tracker()
            assert inner.config.fp8 is core.config.fp8


def test_the_core_is_built_for_the_heads_of_its_rank() -> None:
    run_ranks(4, look_inside, env={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}, timeout=60)


def run_in_fp8_autocast() -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

    recipe = DelayedScaling()
    # After the last layer it reduces the scales by a kernel that needs a GPU.
    with megatron_on_cpu(), patch.object(Manager, "reduce_and_update_fp8_tensors"):
        Setting(cp=2).initialize()
        case = Case(1, 2, 8, 4, TE)
        core = build_core(case)
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe), torch.no_grad():
            tensors = [torch.zeros(8, 2, heads, 4, dtype=torch.float64) for heads in (8, 4, 4)]
            core(*tensors)
        assert core.inner.fp8_meta["recipe"] is recipe
        compare(case, core)


def test_fp8_recipes_reach_the_core() -> None:
    run_ranks(2, run_in_fp8_autocast)


# -- what TransformerEngine would say in the first forward pass ---------------------------------


def refused(case: Case, config: dict[str, Any], says: str) -> None:
    with megatron_on_cpu():
        Setting(tp=case.tp, cp=case.cp).initialize()
        with pytest.raises(ParallelConfigError, match=says):
            build_core(case, **config)


FP8 = dict(fp8="hybrid")
REFUSED = [
    (Case(1, 2, 4, 4, TE), FP8 | dict(fp8_multi_head_attention=True), "one scale", {}),
    (Case(1, 2, 4, 4, TE), {}, "not a 16-bit type", {"NVTE_UNFUSED_ATTN": "0"}),
    (
        Case(1, 2, 4, 4, TE, sinks=True),
        dict(params_dtype=torch.bfloat16),
        "flash: softmax_type='learnable'; fused: NVTE_FUSED_ATTN=0",
        {"NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"},
    ),
    (
        Case(1, 2, 4, 4, TE),
        FP8 | dict(params_dtype=torch.bfloat16, fp8_dot_product_attention=True),
        "in FP8 by DelayedScaling .no GPU. without a backend",
        {"NVTE_FUSED_ATTN": "0"},
    ),
]


@pytest.mark.parametrize(("case", "config", "says", "env"), REFUSED, ids=lambda v: str(v)[:40])
@pytest.mark.filterwarnings("ignore:uneven")
def test_refused_when_built(
    case: Case, config: dict[str, Any], says: str, env: dict[str, str]
) -> None:
    run_ranks(case.ranks, refused, case, config, says, env=env)


def built_with_fp8() -> None:
    with megatron_on_cpu():
        Setting(cp=2).initialize()
        build_core(Case(1, 2, 1, 1, TE), **FP8)


@pytest.mark.filterwarnings("ignore:uneven")
def test_a_rank_without_heads_is_no_obstacle_to_fp8() -> None:
    """It attends with a head of zeros, so that it takes part wherever scales are reduced."""
    run_ranks(2, built_with_fp8)


def a_bias_of_two_dims() -> None:
    with megatron_on_cpu():
        Setting(cp=2).initialize()
        core = build_core(Case(1, 2, 4, 4, TE))
        tensors = [torch.randn(4, 1, 4, 4, dtype=torch.float64) for _ in "qkv"]
        bias = torch.randn(8, 8, dtype=torch.float64)
        outputs = [core(*tensors, attention_bias=b) for b in (bias, bias[None, None])]
        assert torch.equal(*outputs)
        assert not torch.equal(outputs[0], core(*tensors))


def test_a_bias_of_two_dims() -> None:
    run_ranks(2, a_bias_of_two_dims)


def mla_with_packed_documents() -> None:
    """Megatron-core 0.19 pads the values to the queries' head dimension, and tells the core."""
    from ulysses_mc.layers import packed_seq_params, with_ulysses

    setting = Setting(cp=2, config=MLA)
    with megatron_on_cpu(), torch.no_grad():
        setting.initialize()
        te = import_module("megatron.core.extensions.transformer_engine").TEDotProductAttention
        (model,) = gpt_chunks(setting, lambda config: with_ulysses(local_spec(config), core=te))
        layout, rank = SequenceLayout.zigzag(SEQUENCE, 2), dist.get_rank()
        tokens = layout.shard(tokens_of(0, 1)[:, :-1], 1, rank)
        positions = layout.shard(torch.arange(SEQUENCE)[None], 1, rank)
        unpacked, packed = (
            model(tokens, positions, None, packed_seq_params=params)
            for params in (None, packed_seq_params([0, SEQUENCE], layout, device="cpu"))
        )
    torch.testing.assert_close(packed, unpacked)


def test_mla_with_packed_documents() -> None:
    run_ranks(2, mla_with_packed_documents, timeout=60)


def stock_fails_when_run() -> None:
    """The same without Ulysses: TransformerEngine says so in its forward pass only."""
    from megatron.core.transformer.enums import AttnMaskType

    with megatron_on_cpu():
        Setting().initialize()
        core = build_core(Case(1, 1, 4, 4, TE))
        tensors = [torch.zeros(8, 2, 4, 4, dtype=torch.float64) for _ in range(3)]
        with pytest.raises(ValueError, match="No dot product attention backend"):
            core(*tensors, None, attn_mask_type=AttnMaskType.causal)


def test_what_transformer_engine_itself_says() -> None:
    run_ranks(1, stock_fails_when_run, env={"NVTE_UNFUSED_ATTN": "0"})


def deterministic_without_the_switch() -> None:
    with megatron_on_cpu():
        Setting(cp=2).initialize()
        with pytest.raises(RuntimeError, match="NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
            build_core(Case(1, 2, 4, 4, TE), deterministic_mode=True)


def test_megatrons_own_errors_come_when_built() -> None:
    run_ranks(2, deterministic_without_the_switch)


# -- layers that carry a state from token to token ----------------------------------------------

MIXERS = dict(
    num_layers=1, hidden_size=64, mamba_num_heads=8, mamba_state_dim=16, mamba_head_dim=8,
    mamba_num_groups=2, linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_num_key_heads=4, linear_num_value_heads=4,
    deterministic_mode=True,  # linear attention by PyTorch's operations
)  # fmt: skip


def megatrons_mixers_are_refused() -> None:
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.ssm import mamba_mixer
    from megatron.core.ssm.gated_delta_net import common as delta_net

    from ulysses_mc.layers import check_wired, with_ulysses
    from ulysses_mc.parallel_state import ParallelConfig, initialize_model_parallel

    with megatron_on_cpu():
        state = initialize_model_parallel(ParallelConfig(ulysses_parallel_size=2))
        setting = Setting(cp=2, config=MIXERS)
        setting.seed()
        for pattern, mixer in (
            ("M", r"layers\.0\.mixer \(MambaMixer\)"),
            ("G", r"layers\.0\.self_attention \(GatedDeltaNet\)"),
        ):
            # The kernels that they ask for when built need a GPU, and are used in the forward pass.
            with (
                patch.object(mamba_mixer, "HAVE_MAMBA_SSM", True),
                patch.object(delta_net, "HAVE_FLA", True),
            ):
                chunks = hybrid_chunks(
                    setting, lambda config: with_ulysses(hybrid_stack_spec), pattern
                )
            with pytest.raises(ParallelConfigError, match=mixer):
                check_wired(chunks, state)


def test_megatrons_mixers_are_refused() -> None:
    run_ranks(2, megatrons_mixers_are_refused, env={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"})
