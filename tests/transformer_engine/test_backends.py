"""Which backends are said to do what a config asks for: TransformerEngine's own choice agrees.

The GPU, cuDNN's version and flash-attn are what the table says; and cuDNN is taken to have a kernel
wherever it is asked for one.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.megatron.small_gpt import Setting

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")

from ulysses_mc import HeadLayout, ParallelConfigError  # noqa: E402
from ulysses_mc.layers import te_backends  # noqa: E402
from ulysses_mc.layers.te_backends import Machine, attention_recipe, passed_over  # noqa: E402
from ulysses_mc.layers.te_checks import check_transformer_engine  # noqa: E402

FP8 = dict(fp8="hybrid", fp8_dot_product_attention=True)
RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "float32": dict(bf16=False, params_dtype=torch.float32),
    "autocast": dict(
        bf16=False, params_dtype=torch.float32, enable_autocast=True, autocast_dtype=torch.bfloat16
    ),
    "linear layers only": dict(fp8="hybrid", fp8_recipe="tensorwise"),
    "delayed": FP8 | dict(fp8_recipe="delayed"),
    "tensorwise": FP8 | dict(fp8_recipe="tensorwise"),
    "mxfp8": FP8 | dict(fp8_recipe="mxfp8"),
    "blockwise": FP8 | dict(fp8_recipe="blockwise"),
    "nvfp4": dict(fp4="e2m1", fp4_recipe="nvfp4", fp8_dot_product_attention=True),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    dict(softmax_type="learnable"),
    dict(window_size=(4, 0)),
    dict(attention_dropout=0.1),
    dict(window_size=(4, 0), attention_dropout=0.1),
    dict(kv_channels=12),
    dict(kv_channels=200),
    dict(kv_channels=256, window_size=(4, 0)),
    dict(kv_channels=264),
    *(
        dict(multi_latent_attention=True, qk_head_dim=qk, qk_pos_emb_head_dim=64, v_head_dim=v)
        for qk, v in ((128, 128), (128, 96), (0, 256), (8, 8))
    ),
]
GPUS = [(7, 5), (8, 9), (9, 0), (10, 0), (12, 0)]
CUDNN = [(9, 10, 0), (9, 20, 0), (9, 23, 1), (9, 24, 0)]
FLASH: list[set[int]] = [set(), {2}, {3}, {4}, {2, 3, 4}]
SWITCHES = [
    {},
    {"NVTE_FLASH_ATTN": "0"},
    {"NVTE_FLASH_ATTN_V2": "0"},
    {"NVTE_FLASH_ATTN_V3": "0", "NVTE_FLASH_ATTN_V4": "0"},
    {"NVTE_UnfusedDPA_Emulate_FP8": "1"},
    {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
    {"NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"},
]


def config_of(recipe: str, options: dict[str, Any]) -> Any:
    half = dict(bf16=True, params_dtype=torch.bfloat16, kv_channels=64)
    return Setting(config=half | RECIPES[recipe] | options).transformer_config()


@pytest.fixture
def choice_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """TransformerEngine's available backends [flash, fused, unfused] on a machine."""
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    installed = utils.FlashAttentionUtils
    for name in vars(installed):
        if name.endswith(("_plus", "_printed")):
            monkeypatch.setattr(installed, name, True)
    # FlashAttention-4's own opinion of head dimensions.
    monkeypatch.setattr(installed, "v4_validate_head_dims", lambda *arguments: None)
    machine = SimpleNamespace()
    monkeypatch.setattr(utils, "get_device_compute_capability", lambda: machine.capability)
    monkeypatch.setattr(utils, "get_cudnn_version", lambda: machine.cudnn)

    def cudnn_has_a_kernel(**asked: Any) -> tuple[int, str]:
        kinds = utils.FusedAttnBackend
        half = asked["qkv_dtype"] in (utils.DType.kBFloat16, utils.DType.kFloat16)
        return (kinds.F16_arbitrary_seqlen if half else kinds.FP8).value, ""

    monkeypatch.setattr(utils, "_get_fused_attn_backend", cudnn_has_a_kernel)

    def choice(config: Any, recipe: Any, given: Machine) -> list[bool]:
        vars(machine).update(vars(given))
        installed.is_installed = 2 in given.flash
        installed.v3_is_installed = 3 in given.flash
        installed.v4_is_installed = 4 in given.flash
        qk, v = te_backends._head_dims(config)
        params = utils.AttentionParams(
            head_dim_qk=qk,
            head_dim_v=v,
            qkv_dtype=config.autocast_dtype if config.enable_autocast else config.params_dtype,
            qkv_layout="sbhd_sbhd_sbhd",
            attn_mask_type="causal",
            window_size=config.window_size or (-1, 0),
            core_attention_bias_requires_grad=False,
            attention_dropout=config.attention_dropout,
            deterministic=te_backends._deterministic(),
            fp8=recipe is not None,
            fp8_meta=recipe and {"recipe": recipe, "local_recipes": [recipe]},
            softmax_type=config.softmax_type,
        )
        return [bool(able) for able in utils.get_attention_backend(params)[-1]]

    for name in ("is_installed", "v3_is_installed", "v4_is_installed"):
        monkeypatch.setattr(installed, name, False)  # restores them at the end
    return choice


def recipe_of(config: Any) -> Any:
    """What Megatron would hand to TransformerEngine's autocast."""
    if config.fp8:
        from megatron.core.fp8_utils import get_fp8_recipe

        return get_fp8_recipe(config)
    if config.fp4:
        from megatron.core.fp4_utils import get_fp4_recipe

        return get_fp4_recipe(config)
    return None


@pytest.mark.parametrize("name", RECIPES)
def test_transformer_engine_says_the_same(
    name: str, choice_on: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[tuple[bool, ...]] = Counter()
    for options in OPTIONS:
        config = config_of(name, options)
        theirs, ours = recipe_of(config), attention_recipe(config)
        for switches, gpu, cudnn, flash in product(SWITCHES, GPUS, CUDNN, FLASH):
            machine = Machine(gpu, cudnn, frozenset(flash))
            with monkeypatch.context() as env:
                for variable, value in switches.items():
                    env.setenv(variable, value)
                right = choice_on(config, theirs, machine)
                reasons = passed_over(config, machine, ours)
            found = [not reason for reason in reasons.values()]
            assert found == right, (options, switches, machine, reasons)
            seen[tuple(found)] += 1
    assert len(seen) > 1 and seen[False, False, False], seen


HOPPER = Machine((9, 0), (9, 20, 0))


@pytest.mark.parametrize(
    ("recipe", "options", "machine", "nearest"),
    [
        ("tensorwise", {}, HOPPER, "fp8_dot_product_attention=False or fp8_recipe='delayed'"),
        ("delayed", dict(window_size=(4, 0)), HOPPER, "fp8_dot_product_attention=False or core="),
        ("mxfp8", {}, Machine((10, 0), (9, 23, 1)), "=False or fp8_recipe='delayed'"),
        ("delayed", {}, HOPPER, None),
        ("tensorwise", {}, Machine((10, 0), (9, 20, 0)), None),
    ],
)
def test_refused_with_what_would_work(
    recipe: str,
    options: dict[str, Any],
    machine: Machine,
    nearest: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Machine, "this", lambda: machine)
    config = config_of(recipe, options)
    if nearest is None:
        check_transformer_engine(config, HeadLayout(4, 4, 2))
        return
    with pytest.raises(ParallelConfigError, match="unfused: it does not compute in FP8") as error:
        check_transformer_engine(config, HeadLayout(4, 4, 2))
    assert nearest in str(error.value)
    assert str(machine) in str(error.value)


def test_the_recipe_that_the_environment_switches_to(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("tensorwise", {})
    for switched, recipe in [("", "Float8CurrentScaling"), ("F16", ""), ("MXFP8BlockScaling",) * 2]:
        monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", switched)
        assert attention_recipe(config) == recipe
