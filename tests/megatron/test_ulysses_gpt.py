"""A GPT trained with Ulysses inside Megatron, against the same GPT without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.megatron.small_gpt import MLA, Setting, Trainer, gpt_chunks, local_spec
from tests.support.pool import run_ranks
from ulysses_mc import megatron_on_cpu

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")


def around_the_specs_core(config: Any) -> Any:
    from ulysses_mc.layers import with_ulysses

    return with_ulysses(local_spec(config))


def local_block(config: Any) -> Any:
    from ulysses_mc.layers.specs import gpt_block_local

    return gpt_block_local(config)


def ready_object(config: Any) -> Any:
    from ulysses_mc.layers import specs

    ending = "_mla" if config.multi_latent_attention else ""
    ending += "_moe" if config.num_moe_experts else ""
    return getattr(specs, f"gpt_layer_local{ending}")


def train(
    setting: Setting, spec: Callable[[Any], Any], steps: int, seed: int
) -> list[tuple[float, float]]:
    from ulysses_mc.layers import wire_dropout

    with megatron_on_cpu():
        setting.initialize()
        torch.manual_seed(seed)
        chunks = gpt_chunks(setting, spec)
        for chunk in chunks:
            sharpen(chunk)
            wire_dropout(chunk)
        return Trainer(setting, chunks).train(steps)


def sharpen(model: torch.nn.Module) -> None:
    """Larger query and key weights: attention that looks somewhere, not everywhere alike."""
    for name, parameter in model.named_parameters():
        if "linear_q" in name and parameter.dim() == 2:
            with torch.no_grad():
                parameter.mul_(8)


def losses(setting: Setting, spec: Callable[[Any], Any], steps: int = 3) -> torch.Tensor:
    """[steps, 2]: loss and gradient norm, the same on every rank."""
    world_size = setting.tp * setting.pp * setting.cp
    ranks = run_ranks(world_size, train, setting, spec, steps, 3, timeout=120)
    results = torch.tensor(ranks, dtype=torch.float64)
    torch.testing.assert_close(results, results[:1].expand_as(results), rtol=1e-6, atol=0)
    return results[0]


def assert_same(found: torch.Tensor, right: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found, right, rtol=tolerance, atol=0)


GQA = dict(num_query_groups=2, qk_layernorm=True)


@pytest.fixture(scope="module")
def without() -> torch.Tensor:
    """One rank, Megatron's own core attention."""
    return losses(Setting(config=GQA), local_spec)


@pytest.mark.parametrize(
    ("setting", "spec"),
    [
        (Setting(cp=2, config=GQA), around_the_specs_core),
        (Setting(cp=4, distributed_optimizer=True, config=GQA), around_the_specs_core),
        (Setting(cp=2, config=GQA), local_block),
        (Setting(tp=2, cp=2, config=GQA), around_the_specs_core),
        (Setting(tp=2, cp=2, config=GQA | dict(sequence_parallel=True)), local_block),
        (
            Setting(cp=2, config=GQA | dict(recompute_granularity="selective")),
            around_the_specs_core,
        ),
        (
            Setting(
                cp=2,
                config=GQA
                | dict(
                    recompute_granularity="full",
                    recompute_method="uniform",
                    recompute_num_layers=1,
                ),
            ),
            local_block,
        ),
    ],
    ids=["dot-cp2", "dot-cp4-zero1", "sdpa-cp2", "dot-tp2-cp2", "tp-sp", "selective", "full"],
)
def test_same_losses_and_gradient_norms(
    without: torch.Tensor, setting: Setting, spec: Callable[[Any], Any]
) -> None:
    assert_same(losses(setting, spec), without)


def test_pipelines() -> None:
    """Stages draw their own weights, so that the number of stages stays."""
    setting = Setting(pp=2, vpp=2, config=GQA)
    assert_same(losses(replace(setting, cp=2), around_the_specs_core), losses(setting, local_spec))


MOE = dict(num_moe_experts=4, moe_router_topk=2, moe_token_dispatcher_type="alltoall")


@pytest.mark.parametrize("spec", [around_the_specs_core, ready_object])
@pytest.mark.parametrize("kind", [MLA, MOE], ids=["mla", "moe"])
def test_other_kinds_of_layers(kind: dict[str, Any], spec: Callable[[Any], Any]) -> None:
    right = losses(Setting(config=kind), ready_object)
    assert_same(losses(Setting(cp=2, config=kind), spec), right)


def test_the_auxiliary_loss_of_experts_does_not_depend_on_the_ranks() -> None:
    """On 0.16 with the coefficient times the Ulysses size, as the README says."""
    from megatron.core import __version__

    def with_coefficient(setting: Setting, coefficient: float) -> torch.Tensor:
        kind = MOE | dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=coefficient)
        return losses(replace(setting, config=kind), ready_object)

    factor = 2 if __version__.startswith("0.16") else 1
    right = with_coefficient(Setting(), 0.5)
    assert_same(with_coefficient(Setting(cp=2), 0.5 * factor), right)
    assert (with_coefficient(Setting(cp=2), 0.0) - right).abs().max() > 0.1  # it counts


def test_a_wrong_order_of_tokens_is_seen() -> None:
    wrong = losses(Setting(cp=2, config=GQA), contiguous_by_mistake)
    assert (wrong - losses(Setting(config=GQA), local_spec)).abs().max() > 1e-3


def contiguous_by_mistake(config: Any) -> Any:
    from ulysses_mc import SequenceLayout
    from ulysses_mc.layers import core_attention, with_ulysses

    class Mistaken(core_attention.UlyssesCoreAttention):
        def forward(self, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            right = core_attention._sequence_layout
            core_attention._sequence_layout = lambda length, size, documents: (
                SequenceLayout.from_lengths([length] * size)
            )
            try:
                return super().forward(query, *args, **kwargs)
            finally:
                core_attention._sequence_layout = right

    spec = with_ulysses(local_spec(config))
    attention = spec.submodules.self_attention
    core = replace(attention.submodules.core_attention, module=Mistaken)
    attention = replace(attention, submodules=replace(attention.submodules, core_attention=core))
    return replace(spec, submodules=replace(spec.submodules, self_attention=attention))
