"""Pretrains a Megatron-core GPT (or hybrid) model with tensor, pipeline, data and Ulysses
parallelism, on GPUs over NCCL or on CPU processes over gloo.

    torchrun --nproc-per-node 8 examples/pretrain_gpt.py --config examples/configs/cpu_demo.yaml

`examples/pretrain_gpt.sh` does the same with checks first. Options: `--help`, or read
`examples/pretraining/config.py`.
"""

from __future__ import annotations

import os
import sys

from pretraining.config import Config, parse
from pretraining.errors import UserError
from pretraining.preflight import check, ranks_per_node


def ranks(config: Config | None = None) -> int:
    """torchrun's WORLD_SIZE; without it what one replica of the model takes, or 0."""
    try:
        given = int(os.environ.get("WORLD_SIZE", 0))
    except ValueError:
        raise UserError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']!r}, not a number") from None
    return given or (ranks_per_node(config, 0) if config else 0)


def main() -> int:
    try:
        request = parse()
        config = request.config
        if request.processes is not None:
            print(ranks_per_node(config, request.processes))
            return 0
        if request.check is not None:
            print(check(config, request.check or ranks(config)).describe())
            return 0
        shape = check(config, ranks() or 1)
        from pretraining.run import run

        return run(config, shape)
    except UserError as error:
        return tell(error, 2)
    except FloatingPointError as error:
        return tell(error, 1)
    except ValueError as error:
        from ulysses_mc import ParallelConfigError

        if not isinstance(error, ParallelConfigError):
            raise
        return tell(error, 2)


def tell(error: Exception, exit_code: int) -> int:
    """Once on a node: all its ranks have the same to say."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr, flush=True)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
