"""The random state of a rank, in checkpoints."""

from __future__ import annotations

from typing import Any

import torch

_STRIDE = 1_000_003  # farther than Megatron's own offsets between ranks


def capture() -> dict[str, Any]:
    from megatron.core import tensor_parallel

    cuda = torch.cuda.is_available()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if cuda else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore(state: dict[str, Any]) -> None:
    from megatron.core import tensor_parallel

    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def seed(number: int, iteration: int = 0) -> None:
    """The state at the start of a run, or where it goes on under another layout.

    No rank's state there is one of the saved ones. Seeding with `number` alone would drop the same
    elements again as at the run's start.
    """
    from megatron.core import tensor_parallel

    own = (number + _STRIDE * iteration) % 2**31
    torch.manual_seed(own)
    tensor_parallel.model_parallel_cuda_manual_seed(own, force_reset_rng=True)
