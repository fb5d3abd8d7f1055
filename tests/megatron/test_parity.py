"""The same real Megatron model at many layouts equals one rank: loss, grad norm, all gradients.

The reference is one process with Megatron's own DotProductAttention and no code of ours.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch

from tests.megatron.gathering import Step, comparable, set_weights, steps_of
from tests.megatron.small_gpt import MLA, Setting, Trainer, gpt_chunks, hybrid_chunks, local_spec
from tests.support.pool import run_ranks
from ulysses_mc import megatron_on_cpu

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares CPU ranks"),
]
pytest.importorskip("megatron.core")

OLD = version("megatron-core").startswith("0.16")
STEPS = 5
TOLERANCE = 2e-5  # relative to the largest element, float32

GQA = {"num_attention_heads": 8, "num_query_groups": 4}
MHA = {"num_attention_heads": 8}
ONE_KV_PER_TENSOR_RANK = {"num_attention_heads": 8, "num_query_groups": 2}
UNEVEN = {"num_attention_heads": 12, "num_query_groups": 6, "kv_channels": 8}
TP_SP = {"sequence_parallel": True}
FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SELECTIVE_RECOMPUTE = {
    "recompute_granularity": "selective",
    # For norms megatron-core 0.16 asks for a name of TransformerEngine's, there or not.
    "recompute_modules": ["core_attn", "mlp"] + ["layernorm"] * (not OLD),
}
SINKS = {"softmax_type": "learnable", "window_size": (5, 0)}
EVERY_SECOND_LAYER = {"window_size": (5, 0), "window_attn_skip_freq": 2}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
}
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5}
LAYER_NORM = {
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "gated_linear_unit": False,
    "activation_func": torch.nn.functional.gelu,
}


def small(config: dict[str, Any], batch: int = 2, **sizes: Any) -> Setting:
    """A layer for each of two pipeline stages, and two micro-batches. An interleaved pipeline takes
    twice as much of both: with less, no backward pass comes before the last forward pass."""
    return Setting(batch=batch, config={"num_layers": 2} | config, **sizes)


SETTINGS = {
    "ulysses2": small(cp=2, config=GQA),
    "ulysses4": small(cp=4, config=MHA),
    "ulysses8": small(cp=8, config=MHA),
    "tp2-ulysses2": small(tp=2, cp=2, config=GQA),
    "tp2-ulysses4": small(tp=2, cp=4, config=GQA),
    "tp4-ulysses2-fewer-kv-than-tp": small(tp=4, cp=2, config=ONE_KV_PER_TENSOR_RANK),
    "ulysses4-replicated-kv": small(cp=4, config=ONE_KV_PER_TENSOR_RANK),
    "ulysses4-uneven": small(cp=4, config=UNEVEN),
    "tp2-ulysses4-uneven": small(tp=2, cp=4, config=UNEVEN),
    "ulysses2-dp2": small(cp=2, config=GQA),
    "ulysses2-dp4-optimizer": small(cp=2, distributed_optimizer=True, batch=4, config=GQA),
    "pp2-ulysses2": small(pp=2, cp=2, config=GQA),
    "tp2-pp2-ulysses2": small(tp=2, pp=2, cp=2, config=GQA),
    "tp2-pp2-ulysses2-optimizer": small(tp=2, pp=2, cp=2, distributed_optimizer=True, config=GQA),
    "interleaved-pp2-ulysses2": Setting(pp=2, vpp=2, cp=2, config=GQA),
    "interleaved-tp2-pp2-ulysses2": Setting(
        tp=2, pp=2, vpp=2, cp=2, distributed_optimizer=True, config=GQA
    ),
    "tied-layernorm-pp2-ulysses2": small(pp=2, cp=2, tied=True, config=MHA | LAYER_NORM),
    "tp2-ulysses2-tpsp": small(tp=2, cp=2, config=GQA | TP_SP),
    "tp2-pp2-ulysses2-tpsp-optimizer": small(
        tp=2, pp=2, cp=2, distributed_optimizer=True, config=GQA | TP_SP
    ),
    "qknorm-tp2-ulysses2-tpsp": small(
        tp=2, cp=2, config=ONE_KV_PER_TENSOR_RANK | TP_SP | {"qk_layernorm": True}
    ),
    "full-recompute-tp2-ulysses2": small(tp=2, cp=2, config=GQA | FULL_RECOMPUTE),
    "selective-recompute-ulysses2": small(cp=2, config=GQA | SELECTIVE_RECOMPUTE),
    # Two sequences at a time: with one, a batch's balance is the balance of a sequence.
    "moe-pp2-ep2-ulysses2": small(pp=2, cp=2, ep=2, batch=4, micro_batch=2, config=GQA | MOE),
    # Experts whole on a rank: else Megatron gathers unequal numbers of tokens, which gloo cannot.
    "moe-tp2-ep2-ulysses2-tpsp": small(
        tp=2, cp=2, ep=2, etp=1, batch=4, micro_batch=2, config=GQA | MOE | TP_SP
    ),
    "mla-pp2-ulysses2": small(pp=2, cp=2, config=MHA | MLA),
    "mtp-tp2-ulysses2": small(tp=2, cp=2, config=GQA | MTP),
    # Attention, MLP, experts. (After the last layer 0.16 and 0.19 have no norm for TP-SP on a CPU,
    # and experts with tensor parallelism ask for TP-SP.)
    "hybrid-ulysses2": small(cp=2, pattern="*-*E", config=GQA | MOE | {"num_layers": 4}),
    "hybrid-tp2-ulysses2": small(tp=2, cp=2, pattern="*-", config=GQA),
    "window-every-second-layer-ulysses2": small(cp=2, config=GQA | EVERY_SECOND_LAYER),
    "sinks-window-tp2-ulysses2": small(tp=2, cp=2, config=GQA | SINKS),
}
WORLD_SIZES = {"ulysses2-dp2": 4, "ulysses2-dp4-optimizer": 8}


def train(setting: Setting, core: str) -> list[Step]:
    setting = comparable(setting)
    with megatron_on_cpu():
        setting.initialize()
        chunks = (
            hybrid_chunks(setting, hybrid_stack, setting.pattern)
            if setting.pattern
            else gpt_chunks(setting, functools.partial(spec, core=core))
        )
        set_weights(chunks)
        trainer = Trainer(setting, chunks)
        return steps_of(trainer, chunks, STEPS)


def spec(config: Any, core: str) -> Any:
    from tests.megatron.test_core_attention import core_of
    from ulysses_mc.layers import with_norm, with_ulysses
    from ulysses_mc.layers.specs import gpt_block_local

    if core == "stock":
        return local_spec(config)
    inside = core_of(core)
    if config.virtual_pipeline_model_parallel_size:  # a block's spec would be one chunk's
        return with_ulysses(with_norm(local_spec(config)), inside)
    return gpt_block_local(config, core=inside)


def hybrid_stack(config: Any) -> Any:
    """One rank's attention is PyTorch's: our stack has no other without TransformerEngine."""
    from ulysses_mc.layers import specs

    return specs.hybrid_stack_local


@functools.cache
def reference(name: str) -> list[Step]:
    """One process, stock Megatron, for the setting of that name. (Its DotProductAttention has no
    latent attention: PyTorch's stands there.)"""
    setting = SETTINGS[name]
    parallel = {"sequence_parallel", *FULL_RECOMPUTE, *SELECTIVE_RECOMPUTE}
    config = {key: value for key, value in setting.config.items() if key not in parallel}
    one = replace(
        setting, tp=1, pp=1, vpp=None, cp=1, ep=1, etp=None, distributed_optimizer=False,
        config=config,
    )  # fmt: skip
    core = "sdpa" if setting.config.get("multi_latent_attention") else "stock"
    key = repr(one)  # settings that are the same model share a run
    if key not in _references:
        (_references[key],) = run_ranks(1, train, one, core, timeout=120)
    return _references[key]


_references: dict[str, list[Step]] = {}


def assert_same(expected: list[Step], found: list[Step]) -> None:
    for number, (right, ours) in enumerate(zip(expected, found, strict=True)):
        where = f"step {number}"
        assert ours[0] == pytest.approx(right[0], rel=TOLERANCE), f"{where}: loss"
        assert ours[1] == pytest.approx(right[1], rel=TOLERANCE), f"{where}: gradient norm"
        assert right[2].keys() == ours[2].keys(), where
        for name, gradient in right[2].items():
            difference = (ours[2][name] - gradient).abs().max()
            assert difference <= TOLERANCE * gradient.abs().max(), (
                f"{where}: gradient of {name}: {difference / gradient.abs().max():.2e}"
            )


def auxiliary_loss_whole(setting: Setting) -> Setting:
    """With the coefficients that keep the experts' auxiliary losses as on one rank: megatron-core
    0.16 scales them by the tokens of a rank, which TP-SP cuts too (README, Limits)."""
    coefficients = setting.config.get("moe_aux_loss_coeff")
    if coefficients is None or not OLD:
        return setting
    ranks = setting.cp * (setting.tp if setting.config.get("sequence_parallel") else 1)
    scaled = {"moe_aux_loss_coeff": [coefficient * ranks for coefficient in coefficients]}
    return replace(setting, config=setting.config | scaled)


@pytest.mark.parametrize("name", SETTINGS)
def test_equals_one_rank(name: str) -> None:
    setting = SETTINGS[name]
    world = WORLD_SIZES.get(name, setting.tp * setting.pp * setting.cp)
    for steps in run_ranks(world, train, auxiliary_loss_whole(setting), "sdpa", timeout=240):
        assert_same(reference(name), steps)


@pytest.mark.parametrize("name", ["ulysses4-replicated-kv", "tp2-ulysses4-uneven"])
def test_around_megatrons_own_attention(name: str) -> None:
    setting = SETTINGS[name]
    for steps in run_ranks(
        setting.tp * setting.cp, train, setting, "DotProductAttention", timeout=240
    ):
        assert_same(reference(name), steps)
