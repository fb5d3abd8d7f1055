"""Which of TransformerEngine's attention backends can do what a config asks for, and why not.

Mirrors `get_attention_backend` of TransformerEngine 2.20 for training, as far as a config decides;
what lengths, masks and cuDNN's own kernels refuse is not known before the first forward pass.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

_HALF = (torch.bfloat16, torch.float16)
_UTILS = "transformer_engine.pytorch.attention.dot_product_attention.utils"
# FP8 attention by cuDNN: the recipe's first cuDNN version, on compute capability 10.0 and above.
_FROM_CUDNN = {"Float8CurrentScaling": (9, 14, 0), "MXFP8BlockScaling": (9, 21, 0)}
_BROKEN_CUDNN = {"MXFP8BlockScaling": ((9, 23, 0), (9, 23, 1))}
_NEVER = ("Float8BlockScaling", "NVFP4BlockScaling")


@dataclass(frozen=True)
class Machine:
    """What TransformerEngine sees of where it runs.

    Args:
        capability: compute capability of the GPU; None without one, then no rule of it holds.
        cudnn: version of cuDNN.
        flash: generations of flash-attn that it found.
    """

    capability: tuple[int, int] | None = None
    cudnn: tuple[int, ...] = (0, 0, 0)
    flash: frozenset[int] = frozenset({2, 3, 4})

    @classmethod
    def this(cls) -> Machine:
        try:
            utils = import_module(_UTILS)
            found = utils.FlashAttentionUtils
            flags = {2: found.is_installed, 3: found.v3_is_installed, 4: found.v4_is_installed}
        except (ImportError, AttributeError):  # another release: nothing is known of it
            return cls()
        flash = frozenset(generation for generation, installed in flags.items() if installed)
        if not torch.cuda.is_available():
            return cls(flash=flash)
        return cls(torch.cuda.get_device_capability(), tuple(utils.get_cudnn_version()), flash)

    def __str__(self) -> str:
        if self.capability is None:
            return "no GPU"
        return f"compute capability {_dotted(self.capability)}, cuDNN {_dotted(self.cudnn)}"


def attention_recipe(config: Any) -> str:
    """TransformerEngine's name of the recipe that attention computes in FP8 by; '' if it does not.

    Not every recipe is handed `fp8_dot_product_attention` by every Megatron.
    """
    if not getattr(config, "fp8_dot_product_attention", False):
        return ""
    if config.fp8:
        from megatron.core.fp8_utils import get_fp8_recipe as get_recipe
    elif getattr(config, "fp4", None):
        from megatron.core.fp4_utils import get_fp4_recipe as get_recipe
    else:
        return ""
    recipe = get_recipe(config)
    switched = os.environ.get("NVTE_DPA_FP8_RECIPE", "")
    if not getattr(recipe, "fp8_dpa", False) or switched == "F16":
        return ""
    # The first base in TransformerEngine: Megatron's delayed scaling is a subclass.
    theirs = [b for b in type(recipe).__mro__ if b.__module__.startswith("transformer_engine.")]
    return switched or theirs[0].__name__


def passed_over(config: Any, machine: Machine, recipe: str) -> dict[str, str]:
    """Why each backend cannot do it; '' if it can, as far as is known."""
    autocast = config.autocast_dtype if config.enable_autocast else None
    half = config.bf16 or config.fp16 or config.params_dtype in _HALF or autocast in _HALF
    not_half = "" if half else f"{config.params_dtype} is not a 16-bit type"
    softmax_type = getattr(config, "softmax_type", "vanilla")
    sinks = "" if softmax_type == "vanilla" else f"softmax_type={softmax_type!r}"
    return {
        "flash": _switched_off("NVTE_FLASH_ATTN")
        or not_half
        or sinks
        or ("it does not train in FP8" if recipe else "")
        or _flash(config, machine),
        "fused": _switched_off("NVTE_FUSED_ATTN")
        or not_half
        or _fused(config, machine, recipe, sinks),
        "unfused": _switched_off("NVTE_UNFUSED_ATTN") or _unfused(recipe, sinks),
    }


def _flash(config: Any, machine: Machine) -> str:
    """Why none of its generations can; '' if one can."""
    capability = machine.capability
    dims = "head dimensions {} and {}".format(*_head_dims(config))
    dropout = "it has no dropout" if config.attention_dropout else ""
    fits = {
        2: capability is None or capability >= (8, 0),
        3: capability is None or capability == (9, 0),
        4: capability is None or capability >= (9, 0),
    }
    hopper_takes_3 = capability == (9, 0) and 3 in machine.flash
    preferred = hopper_takes_3 and not _switched_off("NVTE_FLASH_ATTN_V3")
    reasons = {
        generation: _switched_off(f"NVTE_FLASH_ATTN_V{generation}")
        or ("" if generation in machine.flash else "not installed")
        or ("" if able else "not on this GPU")
        or (dropout if generation > 2 else "")
        or ("FlashAttention-3 is preferred" if generation == 4 and preferred else "")
        or ("" if _flash_has_dims(generation, config, capability) else f"not for {dims}")
        for generation, able in fits.items()
    }
    if not all(reasons.values()):
        return ""
    return ", ".join(f"FlashAttention-{number} {reason}" for number, reason in reasons.items())


def _flash_has_dims(generation: int, config: Any, capability: tuple[int, int] | None) -> bool:
    """Whether it trains with the head dimensions, as far as TransformerEngine decides that itself
    and does not ask FlashAttention-4."""
    qk, v = _head_dims(config)
    if generation == 2:
        wide = capability in (None, (8, 0), (9, 0), (10, 0), (12, 0))
        return max(qk, v) % 8 == 0 and max(qk, v) <= (256 if wide else 192)
    if generation == 3:
        pair = qk == v or (128 < qk <= 192 and 96 < v <= 128) or (qk <= 64 and v <= 512)
        return qk <= 256 and pair and not (_deterministic() and max(qk, v) >= 256)
    if capability is None or not (10, 0) <= capability < (12, 0):
        return True
    if qk == v:
        return qk != 512 and not (qk == 256 and _window(config))
    rows, columns = (math.ceil(dim / 16) * 8 for dim in (qk, v))
    return qk < 128 or columns % math.gcd(32, rows) == 0


def _window(config: Any) -> str:
    given = getattr(config, "window_size", None)
    if given is None or (given[0] == -1 and given[1] in (-1, 0)):
        return ""
    return f"window_size={tuple(given)}"


def _fused(config: Any, machine: Machine, recipe: str, sinks: str) -> str:
    capability, cudnn, deterministic = machine.capability, machine.cudnn, _deterministic()
    window = _window(config)
    if recipe in _NEVER:
        return f"{recipe} has none"
    if sinks and deterministic:
        return f"{sinks} is not deterministic"
    if window and config.attention_dropout:
        return f"{window} is without dropout only"
    if capability is None:
        return ""
    qk, v = _head_dims(config)
    if capability == (12, 0) and qk != v and (qk > 128 or qk % 8):
        return f"it has no backward pass of head dimensions {qk} and {v} on this GPU"
    least = (9, 0) if deterministic else (8, 0)
    if capability < least:
        return f"needs compute capability {_dotted(least)}" + " to be deterministic" * deterministic
    if not recipe:
        return ""
    if capability == (12, 0):
        return "it has no FP8 on compute capability 12.0"
    new = recipe if recipe in _FROM_CUDNN else sinks or window
    if new and capability < (10, 0):
        return f"{new} in FP8 needs compute capability 10.0"
    needed = _FROM_CUDNN.get(recipe, (0, 0, 0))
    if sinks or window:
        needed = max(needed, (9, 21, 0))
    if deterministic:
        needed = max(needed, (9, 19, 0))
    if cudnn < needed:
        return f"FP8 needs cuDNN {_dotted(needed)} here"
    broken = cudnn in _BROKEN_CUDNN.get(recipe, ())
    return f"{recipe} is broken in cuDNN {_dotted(cudnn)}" if broken else ""


def _head_dims(config: Any) -> tuple[int, int]:
    """Of query and key, and of value."""
    if getattr(config, "multi_latent_attention", False):
        return config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
    return config.kv_channels, config.kv_channels


def _unfused(recipe: str, sinks: str) -> str:
    if not recipe:
        return ""
    if sinks:
        return f"{sinks} in FP8"
    if os.environ.get("NVTE_UnfusedDPA_Emulate_FP8", "0") == "1":  # noqa: SIM112
        return ""
    return "it does not compute in FP8 (NVTE_UnfusedDPA_Emulate_FP8=1 emulates it, slowly)"


def _deterministic() -> bool:
    allowed = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") != "0"
    return not allowed or torch.are_deterministic_algorithms_enabled()


def _switched_off(variable: str) -> str:
    # Megatron sets these from config.attention_backend before it builds the layers.
    return f"{variable}=0" if os.environ.get(variable) == "0" else ""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
