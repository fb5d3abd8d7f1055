"""Names in `state_dict()`: those that a core attention has without Ulysses around it."""

from __future__ import annotations

from typing import Any

import torch

_OFFSET = "softmax_offset"


def keep_core_keys(module: torch.nn.Module) -> None:
    """Makes `module` save and load its `inner` core and softmax offsets under the core's own names.

    So a plain checkpoint (`torch.save(model.state_dict())`) fits with and without Ulysses, as
    the distributed ones do; TransformerEngine's `_extra_state` included.
    """
    module.register_state_dict_post_hook(_flatten)
    module.register_load_state_dict_pre_hook(_nest)
    module.register_load_state_dict_post_hook(_forgive)


def _flatten(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        if name == f"{_OFFSET}.weight":
            state[prefix + _OFFSET] = state.pop(key)
        elif name.startswith("inner."):
            state[prefix + name.removeprefix("inner.")] = state.pop(key)


def _nest(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        if name == _OFFSET:
            state[f"{key}.weight"] = state.pop(key)
        elif module.inner is not None:
            state[f"{prefix}inner.{name}"] = state.pop(key)
        elif name == "_extra_state":
            del state[key]


def _forgive(module: torch.nn.Module, incompatible: Any) -> None:
    """As TransformerEngine does: its state may be missing from a checkpoint made without it."""
    missing = incompatible.missing_keys
    missing[:] = [key for key in missing if not key.endswith("core_attention.inner._extra_state")]
