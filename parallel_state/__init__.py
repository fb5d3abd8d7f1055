"""Which ranks form a tensor, pipeline, data, Ulysses, ring or expert group."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config import ParallelConfig
from .errors import HeadDivisibilityError, ParallelConfigError
from .grid import RankGrid

if TYPE_CHECKING:
    from .getters import *  # noqa: F403
    from .initialize import (
        destroy_model_parallel,
        get_parallel_state,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )
    from .state import ParallelState

# Names that need torch, by module; loaded on first use, so that planning needs none.
_LAZY = {
    "ParallelState": "state",
    "destroy_model_parallel": "initialize",
    "get_parallel_state": "initialize",
    "initialize_model_parallel": "initialize",
    "model_parallel_is_initialized": "initialize",
}
__all__ = [
    "HeadDivisibilityError",
    "ParallelConfig",
    "ParallelConfigError",
    "ParallelState",
    "RankGrid",
    "destroy_model_parallel",
    "get_parallel_state",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
]


def __getattr__(name: str) -> Any:
    # Megatron's getters: get_tensor_model_parallel_group and the like.
    module = "getters" if name.startswith("get_") else None
    module = _LAZY.get(name, module)
    if module is None or not hasattr(found := import_module(f"{__name__}.{module}"), name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(found, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
