"""A training step of the example on real CPU ranks: bytes sent, and activations kept, counted."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

SMALL = [
    "--device=cpu", "--logging.tensorboard=false", "--logging.plot=false",
    "--checkpoint.interval=0", "--evaluation.interval=0", "--training.train_iters=2",
    "--training.self_check=false", "--data.split=1,0,0", "--optimizer.lr_warmup_iters=1",
]  # fmt: skip


class Kept:
    """Bytes of the distinct storages that a forward pass keeps for backward, without parameters."""

    def __init__(self, parameters: Any) -> None:
        self.known = {p.untyped_storage().data_ptr() for p in parameters}
        self.sizes: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []  # so that no address is given out twice

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        in_backward = torch._C._current_graph_task_id() != -1  # recomputing: kept for moments only
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known and not in_backward:
            self.sizes[storage.data_ptr()] = storage.nbytes()
            self.alive.append(tensor)
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())


class Shapes:
    """Shapes of the first layer's tensors on this rank, by the names that `explain` gives them."""

    def __init__(self, chunk: Any) -> None:
        self.found: dict[str, tuple[int, ...]] = {}
        modules = dict(chunk.named_modules())
        self.watch(modules, "self_attention.linear_qkv", "hidden states into QKV", "mixed QKV")
        self.watch(modules, "self_attention.linear_proj", "context", "attention output")
        self.watch(modules, "mlp.linear_fc1", "", "gate and up")
        self.watch(modules, "mlp.linear_fc2", "activated", "layer output")
        self.watch(modules, "output_layer", "", "logits")
        self.watch(modules, "core_attention", "query", "")

    def watch(self, modules: dict[str, Any], ending: str, before: str, after: str) -> None:
        for name, module in modules.items():
            if name.endswith(ending):
                module.register_forward_hook(self.hook(ending, before, after))
                return

    def hook(self, ending: str, before: str, after: str) -> Any:
        def record(module: Any, arguments: Any, result: Any) -> None:
            names = ("query", "key", "value") if ending == "core_attention" else (before,)
            for name, tensor in zip(names, arguments, strict=False):
                self.found.setdefault(name, tuple(tensor.shape))
            result = result[0] if isinstance(result, tuple) else result
            self.found.setdefault(after, tuple(result.shape))

        return record

    def by_heads(self, gather: Any) -> Any:
        """`transport.gather_sequence`, with the shapes of its first call noted."""

        def gather_sequence(*arguments: Any) -> Any:
            results = gather(*arguments)
            for name, tensor in zip(("query", "key", "value"), results, strict=False):
                self.found.setdefault(f"{name} by heads", tuple(tensor.shape))
            return results

        return gather_sequence


def measured_step(argv: list[str]) -> dict[str, Any]:
    """Runs on every rank, as `pretraining.run.run` does; one step is counted, after a first one.

    Returns:
        sent: bytes by peer. kept: bytes of activations. peers: the rank's peers by kind of group.
        shapes: of the first layer's tensors.
    """
    import torch.distributed as dist

    from examples.pretraining import config, preflight, run
    from tests.support.wire import count_wire
    from ulysses_mc import transport

    device = torch.device("cpu")
    options = config.parse([*SMALL, *argv]).config
    shape = preflight.check(options, dist.get_world_size())
    with run.on_device(device), run.quiet():
        trainer = run.prepare(options, shape, device)
        trainer.train_step()  # makes what is made when first needed
        shapes = Shapes(trainer.model[0])
        kept = Kept([p for chunk in trainer.model for p in chunk.parameters()])
        gather = shapes.by_heads(transport.gather_sequence)
        with (
            count_wire() as wire,
            torch.autograd.graph.saved_tensors_hooks(kept.pack, _same),
            mock.patch.object(transport, "gather_sequence", gather),
        ):
            trainer.train_step()
    rank = dist.get_rank()
    peers = {
        kind: [other for other in shape.grid.group_of(rank, kind) if other != rank]
        for kind in ("tp", "ulysses", "pp", "dp")
    }
    return {"sent": dict(wire.sent), "kept": kept.nbytes, "peers": peers, "shapes": shapes.found}


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
