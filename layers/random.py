"""Random draws that must differ between the ranks of a group, and leave no trace otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Far apart, so that neighbouring ranks' streams do not meet.
_STRIDE = 0x9E3779B97F4A7C15
_OFFSET_STRIDE = 0xD1B54A32D192ED03


@contextmanager
def rank_distinct_rng(rank: int, device: torch.device) -> Iterator[None]:
    """Draws inside differ between ranks; the default generator ends in the same state on all.

    The rank's stream follows from the default generator's state, which the ranks share, so
    recomputation (which restores that state) repeats it, and nothing else needs saving. No host
    synchronisation.
    """
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
        seed = generator.initial_seed()
        offset = generator.get_offset()
        own_seed = seed + _STRIDE * (rank + 1) + _OFFSET_STRIDE * offset
        generator.manual_seed(own_seed % 2**63)
        try:
            yield
        finally:
            # By a fixed amount: how much is drawn inside may differ between ranks.
            generator.manual_seed(seed)
            generator.set_offset(offset + 4)
    else:
        draw = int(torch.randint(2**62, ()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((draw + _STRIDE * (rank + 1)) % 2**63)
            yield
