"""Specs are rewritten without touching the given ones; what is not wired is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.megatron.small_gpt import Setting, gpt_chunks, local_spec
from tests.support.pool import run_ranks
from ulysses_mc import ParallelConfigError, megatron_on_cpu

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")

from ulysses_mc.layers import Norm, UlyssesCoreAttention, check_wired, with_ulysses  # noqa: E402
from ulysses_mc.layers import specs as ready  # noqa: E402

HAVE_TE = bool(pytest.importorskip("megatron.core.extensions.transformer_engine").HAVE_TE)


def cores(spec: Any) -> list[Any]:
    """Every core_attention nested in a spec."""
    found: list[Any] = []

    def visit(name: str, value: Any) -> None:
        if name == "core_attention":
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(name, item)
        elif hasattr(value, "keywords"):
            for key, item in value.keywords.items():
                visit(key, item)
        elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
            for key in value.__dataclass_fields__:
                visit(key, getattr(value, key))

    visit("", spec)
    return found


def all_wired(spec: Any) -> bool:
    found = [core for core in cores(spec) if core is not None]
    return bool(found) and all(core.module is UlyssesCoreAttention for core in found)


def config(**values: Any) -> Any:
    return Setting(config=values).transformer_config()


def given_specs() -> dict[str, Any]:
    from megatron.core.models.gpt import gpt_layer_specs as gpt
    from megatron.core.models.T5 import t5_spec

    found = {
        "layer": local_spec(config()),
        "mla": gpt.get_gpt_layer_local_spec(multi_latent_attention=True),
        "moe": gpt.get_gpt_layer_local_spec(num_experts=4),
        "t5": t5_spec.get_t5_decoder_with_local_block_spec(2)
        if hasattr(t5_spec, "get_t5_decoder_with_local_block_spec")
        else t5_spec.decoder_model_with_local_default_spec(),
        "mtp": gpt.get_gpt_mtp_block_spec(
            config(mtp_num_layers=1), local_spec(config()), use_transformer_engine=False
        ),
    }
    if HAVE_TE:
        found["te"] = gpt.get_gpt_layer_with_transformer_engine_spec()
        found["te moe"] = gpt.get_gpt_layer_with_transformer_engine_spec(
            num_experts=4, moe_grouped_gemm=True
        )
    try:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    except ImportError:
        pass
    else:
        found["hybrid"] = hybrid_stack_spec
    return found


def look_at_specs() -> None:
    from megatron.core import parallel_state

    with megatron_on_cpu():
        Setting().initialize()
        assert parallel_state.is_initialized()
        for name, spec in given_specs().items():
            before = [id(core) for core in cores(spec)]
            text = repr(spec)
            wired = with_ulysses(spec)
            assert all_wired(wired), name
            assert [id(core) for core in cores(spec)] == before, name
            assert repr(spec) == text, name
            assert type(wired) is type(spec)
            again = with_ulysses(wired)
            assert [core.params for core in cores(again) if core] == [
                core.params for core in cores(wired) if core
            ]


def test_every_kind_of_spec_is_rewritten_and_none_is_edited() -> None:
    run_ranks(1, look_at_specs, timeout=60)


def test_a_spec_without_attention_is_refused() -> None:
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    with pytest.raises(ParallelConfigError, match="names a core_attention"):
        with_ulysses(ModuleSpec(module=IdentityOp))
    with pytest.raises(ParallelConfigError, match="core='flash'"):
        with_ulysses(local_spec(config()), core="flash")


def own_attention(query: Any, key: Any, value: Any, *, causal: bool = False) -> torch.Tensor:
    raise NotImplementedError


def test_a_wired_spec_takes_another_core() -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    wired = with_ulysses(local_spec(config()), "sdpa")
    (core,) = cores(with_ulysses(wired, own_attention, uneven_heads=False))
    assert core.params == {"core": own_attention, "uneven_heads": False}
    (core,) = cores(with_ulysses(with_ulysses(wired, uneven_heads=False), DotProductAttention))
    assert core.params == {"core": DotProductAttention, "uneven_heads": False}
    assert cores(with_ulysses(wired)) == cores(wired)


def test_the_exchange_is_not_put_into_itself() -> None:
    from megatron.core.transformer.spec_utils import ModuleSpec

    class Mine(UlyssesCoreAttention):
        pass

    spec = local_spec(config())
    for value in (Mine, UlyssesCoreAttention, ModuleSpec(module=Mine, params={"core": "sdpa"})):
        copied = copy.deepcopy(spec)
        copied.submodules.self_attention.submodules.core_attention = value
        (core,) = cores(with_ulysses(copied, uneven_heads=False))
        module = value.module if isinstance(value, ModuleSpec) else value
        assert core.module is module
        assert core.params["uneven_heads"] is False
        assert cores(with_ulysses(copied)) == [value]
        with pytest.raises(ParallelConfigError, match="not what makes them"):
            with_ulysses(spec, core=value)


def test_what_cannot_be_called_as_attention_is_refused_when_the_spec_is_made() -> None:
    import functools

    from megatron.core.transformer.dot_product_attention import DotProductAttention

    spec = local_spec(config())
    for core in (lambda config, layer_number: None, lambda query, key, value: None):
        with pytest.raises(ParallelConfigError, match="as local attention"):
            with_ulysses(spec, core)
    with megatron_on_cpu():  # a class with some of its arguments is still a class
        spec.submodules.self_attention.submodules.core_attention = functools.partial(
            DotProductAttention, softmax_scale=0.5
        )
        from ulysses_mc.layers.inner_core import resolve_core

        (core,) = cores(with_ulysses(spec))
        inner = resolve_core(core.params["core"])
    assert inner.module is DotProductAttention
    assert inner.spec.params == {"softmax_scale": 0.5}


def builds_a_core(**arguments: Any) -> Any:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    return DotProductAttention(**arguments)


def test_a_function_that_builds_the_core_is_refused() -> None:
    """Megatron-core 0.19 takes one; which core it builds is not known before."""
    from dataclasses import replace

    given = local_spec(config())
    attention = copy.copy(given.submodules.self_attention)
    attention.submodules = replace(attention.submodules, core_attention=builds_a_core)
    with pytest.raises(ParallelConfigError, match=r"builds_a_core.*\n.*known before it is built"):
        with_ulysses(attention)
    wired = with_ulysses(attention, core="sdpa")
    assert wired.submodules.core_attention.params["core"] == "sdpa"


def test_specs_in_a_dict_are_wired() -> None:
    spec = local_spec(config())
    changed = with_ulysses([spec, {"other": spec}])
    assert all_wired(changed[0])
    assert all_wired(changed[1]["other"])


@pytest.mark.parametrize("name", sorted(ready._SPECS))
def test_ready_specs_are_objects(name: str) -> None:
    from megatron.core.transformer.spec_utils import ModuleSpec

    if "_te" in name and not HAVE_TE:
        with pytest.raises(ParallelConfigError, match="without TransformerEngine"):
            getattr(ready, name)
        return
    spec = getattr(ready, name)
    assert isinstance(spec, ModuleSpec)
    assert spec is getattr(ready, name)
    assert all_wired(spec)


# -- check_wired ----------------------------------------------------------------------------


def wired_spec(config: Any) -> Any:
    return with_ulysses(local_spec(config))


def check(names: list[str], wire: bool, dropout: float, embedding: bool) -> None:
    from ulysses_mc.layers import wire_dropout
    from ulysses_mc.parallel_state import ParallelConfig, initialize_model_parallel

    with megatron_on_cpu():
        state = initialize_model_parallel(ParallelConfig(ulysses_parallel_size=2))
        setting = Setting(cp=2, config=dict(hidden_dropout=dropout))
        # Megatron's own core refuses context parallelism by an assertion, so not that one.
        chunks = gpt_chunks(setting, wired_spec if wire else silent_spec)
        if embedding:
            wire_dropout(chunks[0])
        if not names:
            check_wired(chunks, state)
            return
        with pytest.raises(ParallelConfigError) as caught:
            check_wired(chunks[0], state)
        for name in names:
            assert name in str(caught.value)


class Silent(torch.nn.Module):
    """A core attention that attends to its own tokens only, whatever the config says."""

    def __init__(self, **_: Any) -> None:
        super().__init__()


def silent_spec(config: Any) -> Any:
    spec = copy.deepcopy(local_spec(config))
    spec.submodules.self_attention.submodules.core_attention = Silent
    return spec


@pytest.mark.parametrize(
    ("names", "wire", "dropout", "embedding"),
    [
        ([], True, 0.0, False),
        ([], True, 0.1, True),
        (["layers.0.self_attention.core_attention (Silent)", "1 more"][:1], False, 0.0, False),
        (["embedding.embedding_dropout"], True, 0.1, False),
    ],
    ids=["wired", "wired-dropout", "unwired", "unwired-embedding"],
)
def test_row_05_what_is_not_wired_is_named(
    names: list[str], wire: bool, dropout: float, embedding: bool
) -> None:
    run_ranks(2, check, names, wire, dropout, embedding)


def around_a_ring() -> str:
    """Without the refusal a ulysses_parallel_size of 1 would let any attention pass."""
    from ulysses_mc.parallel_state import ParallelConfig, initialize_model_parallel

    with megatron_on_cpu():
        state = initialize_model_parallel(ParallelConfig(ring_parallel_size=2))
        with pytest.raises(ParallelConfigError) as caught:
            check_wired(gpt_chunks(Setting(cp=2), silent_spec), state)
        return str(caught.value)


def test_a_model_around_a_ring_is_refused() -> None:
    for message in run_ranks(2, around_a_ring):
        assert "ring_parallel_size=2." in message and "no ring attention yet" in message
        assert "ring_parallel_size 1 with ulysses_parallel_size 2" in message


def another_grid(destroyed: bool) -> str:
    """A model over ranks [0, 1] and [2, 3], checked against a grid of [0, 2] and [1, 3]."""
    from ulysses_mc.parallel_state import (
        ParallelConfig,
        destroy_model_parallel,
        initialize_model_parallel,
    )

    with megatron_on_cpu():
        initialize_model_parallel(ParallelConfig(ulysses_parallel_size=2))
        chunks = gpt_chunks(Setting(cp=2), wired_spec)
        other = ParallelConfig(tensor_model_parallel_size=2, ulysses_parallel_size=2)
        if destroyed:
            destroy_model_parallel()
            state = initialize_model_parallel(other)
        else:
            state = initialize_model_parallel(other, use_megatron=False)
        with pytest.raises(ParallelConfigError, match="of this state") as caught:
            check_wired(chunks, state)
        return str(caught.value)


@pytest.mark.parametrize("destroyed", [False, True])
def test_a_model_of_another_grid_of_the_same_size_is_refused(destroyed: bool) -> None:
    first, *_ = run_ranks(4, another_grid, destroyed, timeout=60)
    wrong = "a group that was destroyed" if destroyed else "ranks [0, 1], not [0, 2]"
    assert f"core_attention (over {wrong})" in first


def test_mamba_is_refused() -> None:
    from types import SimpleNamespace

    class MambaMixer(torch.nn.Module):
        pass

    state = SimpleNamespace(config=SimpleNamespace(ulysses_parallel_size=2, ring_parallel_size=1))
    model = torch.nn.ModuleDict({"mixer": MambaMixer()})
    with pytest.raises(ParallelConfigError, match=r"mixer \(MambaMixer\)"):
        check_wired(model, state)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "mixer",
    [
        torch.nn.MultiheadAttention(8, 2),
        torch.nn.TransformerEncoderLayer(8, 2, batch_first=True),
        torch.nn.LSTM(8, 8),
    ],
    ids=lambda module: type(module).__name__,
)
def test_pytorchs_own_mixers_are_refused(mixer: torch.nn.Module) -> None:
    from types import SimpleNamespace

    sizes = dict(ring_parallel_size=1, tensor_model_parallel_size=1)
    model = torch.nn.ModuleDict({"own": mixer})
    alone, both = (
        SimpleNamespace(config=SimpleNamespace(ulysses_parallel_size=n, **sizes)) for n in (1, 2)
    )
    check_wired(model, alone)  # type: ignore[arg-type]
    with pytest.raises(ParallelConfigError, match=r"own\S* \((MultiheadAttention|LSTM)\)"):
        check_wired(model, both)  # type: ignore[arg-type]


def test_norms_follow_the_config() -> None:
    for normalization, kind in (("RMSNorm", torch.nn.RMSNorm), ("LayerNorm", torch.nn.LayerNorm)):
        values = dict(normalization=normalization, layernorm_zero_centered_gamma=True)
        norm = Norm(config(**values), 8, 1e-5)
        plain = kind(8, eps=1e-5)
        x = torch.randn(3, 8)
        assert torch.equal(norm(x), plain(x))
        assert not norm.weight.sequence_parallel
    sharded = Setting(tp=2, config=dict(sequence_parallel=True)).transformer_config()
    assert all(p.sequence_parallel for p in Norm(sharded, 8).parameters())
    with pytest.raises(ParallelConfigError, match="L2Norm"):
        Norm(config(normalization="L2Norm"), 8)
