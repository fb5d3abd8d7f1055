"""Names inside Megatron that need more than a translated device to work without a GPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import torch


def megatron_replacements() -> Iterator[tuple[Any, str, Any]]:
    try:
        random = import_module("megatron.core.tensor_parallel.random")
    except ModuleNotFoundError as error:
        raise ImportError(
            "megatron_on_cpu needs megatron-core: pip install 'ulysses-mc[megatron]'. The "
            "plain PyTorch layers (UlyssesAttention) work without it."
        ) from error
    # Without a GPU it would queue the state until CUDA is initialised, which never happens.
    yield random, "_set_cuda_rng_state", _set_cuda_rng_state
    # TransformerEngine's matrix product of the MoE router; None selects torch's. (Without
    # TransformerEngine, 0.16.1 forgets to define the name that it asks for.)
    yield import_module("megatron.core.transformer.moe.moe_utils"), "te_general_gemm", None
    # Sizes of messages become numbers on the way from the GPU; these never were there.
    dispatcher = import_module("megatron.core.transformer.moe.token_dispatcher")
    yield dispatcher, "maybe_move_tensor_to_cpu", _maybe_move_tensor_to_cpu
    # Without TransformerEngine 0.16.1 takes it for installed here, and asks whether a layer is an
    # instance of a stand-in that is no class.
    latent = import_module("megatron.core.transformer.multi_latent_attention")
    if not isinstance(latent.TELinear, type) and latent.HAVE_TE:
        yield latent, "HAVE_TE", False
    # With torch's Adam (not TransformerEngine's or apex's) it cannot load a checkpoint: it asks a
    # new optimizer for its step, and later for a step per parameter, which it never saves.
    optimizer = import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    yield optimizer, "state_dict", _with_adam_state(optimizer.state_dict)
    name = "_set_main_param_and_optimizer_states"
    yield optimizer, name, _with_adam_step(getattr(optimizer, name))
    yield from _unfused_optimizers()
    yield from _unfused_norms()


def _set_cuda_rng_state(
    new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False
) -> None:
    torch.set_rng_state(new_state)


def _maybe_move_tensor_to_cpu(
    tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _with_adam_state(state_dict: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def initialized_state_dict(self: Any) -> Any:
        adam = self.optimizer
        if isinstance(adam, (torch.optim.Adam, torch.optim.AdamW)):
            for parameter in (p for group in adam.param_groups for p in group["params"]):
                if "step" not in adam.state[parameter]:
                    adam.state[parameter].update(
                        step=torch.zeros(()),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )
        return state_dict(self)

    return initialized_state_dict


def _with_adam_step(set_states: Callable[..., None]) -> Callable[..., None]:
    def set_states_and_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if isinstance(state.get("step"), torch.Tensor):  # load_state_dict has set it already
            tensors = {"step": state["step"], **tensors}
        set_states(self, model_param, tensors)

    return set_states_and_step


def _unfused_optimizers() -> Iterator[tuple[Any, str, Any]]:
    """TransformerEngine's or apex's optimizer kernels -> what Megatron uses without them."""
    package = import_module("megatron.core.optimizer")
    utils = import_module("megatron.core.utils")
    fallbacks: dict[str, dict[str, Any]] = {
        "megatron.core.optimizer": {
            "Adam": torch.optim.AdamW,
            "SGD": torch.optim.SGD,
        },
        "megatron.core.optimizer.distrib_optimizer": {
            "Adam": torch.optim.Adam,
            "HAVE_APEX_OR_TE": False,
            "USING_TE_OPTIMIZER": False,
            "USING_APEX_OPTIMIZER": False,
        },
        "megatron.core.optimizer.optimizer": {
            "multi_tensor_applier": utils.local_multi_tensor_applier,
            "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
        },
        "megatron.core.optimizer.clip_grads": {
            "multi_tensor_applier": utils.local_multi_tensor_applier,
            "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
            "multi_tensor_scale_tensor_impl": None,
            "l2_norm_impl": utils.local_multi_tensor_l2_norm,
        },
    }
    if not package.USING_PYTORCH_OPTIMIZER:  # torch's AdamW lacks some of FusedAdam's arguments
        yield package, "USING_PYTORCH_OPTIMIZER", True
        for module, names in fallbacks.items():
            for name, value in names.items():
                if hasattr(sys.modules[module], name):
                    yield sys.modules[module], name, value


def _unfused_norms() -> Iterator[tuple[Any, str, Any]]:
    """The norms that are not part of a layer spec: after the last layer."""
    torch_norm = import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    block = import_module("megatron.core.transformer.transformer_block")
    if block.LayerNormImpl is not torch_norm:  # TransformerEngine or apex is installed
        yield block, "LayerNormImpl", torch_norm
    for name in ("models.hybrid.hybrid_block", "ssm.mamba_block"):  # in 0.19, in 0.16
        with contextlib.suppress(ModuleNotFoundError):
            hybrid: ModuleType = import_module(f"megatron.core.{name}")
            yield hybrid, "TENorm", torch_norm  # there without any choice
