"""Weights and gradients of a whole model, whatever ranks its parts lie on."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from .small_gpt import Setting, Trainer

Step = tuple[float, float, dict[str, torch.Tensor]]  # loss, gradient norm, gradients

# Large enough that attention is far from uniform: a wrong layout or RoPE then shows.
QUERY_KEY_SCALE, WEIGHT_SCALE = 0.3, 0.15


def comparable(setting: Setting) -> Setting:
    """Adam divides by the size of a gradient: with its usual epsilon, elements that are nothing but
    rounding would move the weights as far as the others do."""
    return replace(setting, lr=1e-3, adam_eps=1e-4)


def steps_of(trainer: Trainer, chunks: list[Any], steps: int) -> list[Step]:
    """Trains, and keeps all that shall be the same on other ranks."""
    results = []
    for number in range(steps):
        loss = trainer.forward_backward(number)
        gradients = whole_gradients(chunks, trainer.model)
        updated, grad_norm, _ = trainer.optimizer.step()
        assert updated
        results.append((loss, float(grad_norm), gradients))
    return results


def set_weights(chunks: list[Any]) -> None:
    """Gives every parameter the values that its name in the whole model says."""
    for name, parameter in named_parameters(chunks):
        seed = zlib.crc32(name.encode())
        shape = list(parameter.shape)
        group = _tensor_parallel_group(name)
        dim = _partition_dim(parameter)
        if dim is not None:
            shape[dim] *= group.size()
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        scale = QUERY_KEY_SCALE if "linear_q" in name else WEIGHT_SCALE
        whole = whole * scale + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        if dim is not None:
            whole = _shards(whole, dim, group.size(), "linear_fc1" in name)[group.rank()]
        with torch.no_grad():
            parameter.copy_(whole)


def named_parameters(chunks: list[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters under the names that they have in the model on one rank."""
    for chunk in chunks:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, parameter in chunk.named_parameters():
            layer = re.match(r"decoder\.layers\.(\d+)", name)
            if layer:
                name = f"decoder.layers.{numbers[int(layer[1])]}" + name[layer.end() :]
            name = re.sub(r"(?<=local_experts\.)\d+", _global_expert(chunk.config), name)
            name = name.replace("softmax_offset.weight", "softmax_offset")  # the core's own name
            if chunk.share_embeddings_and_output_weights and name == "output_layer.weight":
                name = "embedding.word_embeddings.weight"  # the last stage's copy
            yield name, parameter


def whole_gradients(chunks: list[Any], wrapped: list[Any]) -> dict[str, torch.Tensor]:
    """Every parameter's gradient as on one rank; the same dictionary on all ranks.

    Args:
        chunks: the model's chunks on this rank.
        wrapped: the same in Megatron's DDP, after finalize_model_grads.
    """
    from megatron.core import parallel_state

    for ddp in wrapped:
        if ddp.ddp_config.use_distributed_optimizer:
            _gather_gradient_shards(ddp)
    mine: dict[str, torch.Tensor] = {}
    for name, parameter in named_parameters(chunks):
        gradient, group = parameter.main_grad.detach().clone(), _tensor_parallel_group(name)
        shards = [torch.empty_like(gradient) for _ in range(group.size())]
        dist.all_gather(shards, gradient, group=group)
        dim = _partition_dim(parameter)
        if dim is not None:
            mine[name] = _joined(shards, dim, "linear_fc1" in name)
        else:
            for rank, shard in enumerate(shards):
                difference = (shard - gradient).abs().max()
                assert difference <= 1e-6 * gradient.abs().max().clamp_min(1e-3), (
                    f"{name}: tensor-parallel ranks differ by {difference} at {rank}"
                )
            mine[name] = gradient
    mine = _joined_over(parallel_state.get_expert_model_parallel_group(), mine)
    return _joined_over(parallel_state.get_pipeline_model_parallel_group(), mine)


def _global_expert(config: Any) -> Callable[[re.Match[str]], str]:
    from megatron.core import parallel_state

    held = (config.num_moe_experts or 0) // config.expert_model_parallel_size
    first = held * parallel_state.get_expert_model_parallel_rank()
    return lambda number: str(first + int(number[0]))


def _joined_over(group: Any, mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of all ranks: other experts, other stages."""
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, mine, group=group)
    return {name: gradient for part in parts for name, gradient in part.items()}


def _gather_gradient_shards(ddp: Any) -> None:
    """The distributed optimizer reduce-scatters: fetch the other ranks' shards."""
    for buffer in [*ddp.buffers, *ddp.expert_parallel_buffers]:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def _tensor_parallel_group(name: str) -> Any:
    """The ranks that share this matrix: experts have a tensor-parallel size of their own."""
    from megatron.core import parallel_state

    if ".experts." in name:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _partition_dim(parameter: torch.nn.Parameter) -> int | None:
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return int(parameter.partition_dim)


def _shards(whole: torch.Tensor, dim: int, size: int, gated: bool) -> list[torch.Tensor]:
    """Cut for tensor parallelism; gate and up projection are cut each by itself."""
    if not gated:
        return list(whole.chunk(size, dim))
    gate, up = whole.chunk(2, dim)
    pairs = zip(gate.chunk(size, dim), up.chunk(size, dim), strict=True)
    return [torch.cat(pair, dim) for pair in pairs]


def _joined(shards: list[torch.Tensor], dim: int, gated: bool) -> torch.Tensor:
    if not gated:
        return torch.cat(shards, dim)
    halves = [shard.chunk(2, dim) for shard in shards]
    return torch.cat([half[0] for half in halves] + [half[1] for half in halves], dim)
