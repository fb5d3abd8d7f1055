"""Whether sizes multiply to the world, and which nearby ones do. Pure arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .errors import ParallelConfigError

if TYPE_CHECKING:
    from .config import ParallelConfig

_FACTORS = (
    "tensor_model_parallel_size",
    "ulysses_parallel_size",
    "ring_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def misfits(config: ParallelConfig, world_size: int) -> list[str]:
    """The products of `config` that do not divide, or do not make, a world of that size."""
    if world_size < 1:
        return [f"a world of {world_size} ranks is empty"]
    found, dense = [], _product(config, _FACTORS[:4])
    data = config.data_parallel_size
    if data is not None and data * config.model_size != world_size:
        total = data * config.model_size
        found.append(f"{dense} x data_parallel_size={data} is {total}, not {world_size} ranks")
    elif world_size % config.model_size:
        left = world_size % config.model_size
        found.append(f"{dense} leaves {left} of {world_size} ranks over")
    if config.has_experts and world_size % config.expert_model_size:
        names = ("expert_tensor_parallel_size", *_FACTORS[4:5], "pipeline_model_parallel_size")
        left = world_size % config.expert_model_size
        found.append(f"{_product(config, names)} leaves {left} of {world_size} ranks over")
    return found


def check_world(config: ParallelConfig, world_size: int) -> None:
    """Raise ParallelConfigError, with the arithmetic and the nearest sizes, if it does not fit."""
    found = misfits(config, world_size)
    if found:
        raise ParallelConfigError(
            f"{_product(config, _FACTORS)} over {world_size} ranks.",
            "; ".join(found) + ".",
            "tensor x ulysses x ring x pipeline (x data, where given), and expert-tensor x expert "
            "x pipeline, divide the world size.",
            nearest_that_fit(config, world_size),
        )


def nearest_that_fit(config: ParallelConfig, world_size: int) -> str:
    """World sizes for these sizes, then for each size alone the nearest that fits the world."""
    options = []
    below = next((w for w in range(world_size - 1, 0, -1) if not misfits(config, w)), None)
    step = config.model_size * config.expert_model_size  # a common multiple: never out of reach
    top = max(world_size, step * (config.data_parallel_size or 1)) + step
    above = next((w for w in range(world_size + 1, top + 1) if not misfits(config, w)), None)
    worlds = [str(w) for w in (below, above) if w is not None]
    if worlds:
        options.append(f"{' or '.join(worlds)} ranks")
    for name in (*_FACTORS, "data_parallel_size"):
        sizes = _sizes_that_fit(config, world_size, name)
        if sizes:
            options.append(f"{name}={' or '.join(map(str, sizes))}")
    return "; ".join(options)


def _sizes_that_fit(config: ParallelConfig, world_size: int, name: str) -> list[int]:
    """The nearest size below and above the present one of `name` alone that fits, if any."""
    now = getattr(config, name)
    if now is None:
        return []
    lowest = 2 if name.startswith("pipeline") and config.virtual_pipeline_model_parallel_size else 1

    def fits(size: int) -> bool:
        changed: dict[str, Any] = {name: size}
        return not misfits(replace(config, **changed), world_size)

    divisors = [size for size in range(lowest, world_size + 1) if world_size % size == 0]
    below = [size for size in divisors if size < now and fits(size)][-1:]
    above = [size for size in divisors if size > now and fits(size)][:1]
    return below + above


def _product(config: ParallelConfig, names: tuple[str, ...]) -> str:
    sizes = {name: getattr(config, name) for name in names}
    if sizes.get("expert_tensor_parallel_size", 0) is None and config.has_experts:
        sizes["expert_tensor_parallel_size"] = config.etp_size
    shown = [f"{name}={size}" for name, size in sizes.items() if (size or 1) > 1]
    return " x ".join(shown) or "one rank for each replica"
