"""A training step of the example on real CPU ranks: bytes sent, and activations kept, counted."""

from __future__ import annotations

from typing import Any

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


def measured_step(argv: list[str]) -> dict[str, Any]:
    """Runs on every rank, as `pretraining.run.run` does; one step is counted, after a first one.

    Returns:
        sent: bytes by peer. kept: bytes of activations. peers: the rank's peers by kind of group.
    """
    import torch.distributed as dist

    from examples.pretraining import config, preflight, run
    from tests.support.wire import count_wire

    device = torch.device("cpu")
    options = config.parse([*SMALL, *argv]).config
    shape = preflight.check(options, dist.get_world_size())
    with run.on_device(device), run.quiet():
        trainer = run.prepare(options, shape, device)
        trainer.train_step()  # makes what is made when first needed
        kept = Kept([p for chunk in trainer.model for p in chunk.parameters()])
        with count_wire() as wire, torch.autograd.graph.saved_tensors_hooks(kept.pack, _same):
            trainer.train_step()
    rank = dist.get_rank()
    peers = {
        kind: [other for other in shape.grid.group_of(rank, kind) if other != rank]
        for kind in ("tp", "ulysses", "pp", "dp")
    }
    return {"sent": dict(wire.sent), "kept": kept.nbytes, "peers": peers}


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
