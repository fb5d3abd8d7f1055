"""DeepSpeed engines in a worker of the pool, whose process outlives them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tests.zero.training import MICRO_BATCHES, ROWS, optimizer


@contextlib.contextmanager
def deepspeed_left_clean() -> Iterator[None]:
    """DeepSpeed over gloo alone, and without its process-wide groups afterwards."""
    import deepspeed
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    # The extension for ranks of one machine would have to be compiled first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        yield
    finally:
        # ZeRO 3 compares these counts between ranks, and the next test may have other ranks.
        Init.param_id = 0
        DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
        groups._release_process_group_references()
        comm.cdb = None


@contextlib.contextmanager
def deepspeed_engine(state: Any, model: Any, stage: int, **config: Any) -> Iterator[Any]:
    """`model` under ZeRO `stage`, with Adam of torch, over the groups of `state`."""
    import deepspeed

    zero = {"stage": stage, "reduce_bucket_size": 4096, "stage3_prefetch_bucket_size": 4096}
    zero["stage3_param_persistence_threshold"] = 0
    zero.update(config.pop("zero_optimization", {}))
    settings = {
        "train_micro_batch_size_per_gpu": ROWS // state.world_size("dp"),
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,  # the default is 1.0
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        **config,
    }
    with deepspeed_left_clean():
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer(model.parameters()), config=settings, mpu=state
        )
        try:
            yield engine
        finally:
            engine.destroy()
