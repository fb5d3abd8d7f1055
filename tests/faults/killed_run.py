"""examples/pretrain_gpt.py with a SIGKILL in each attempt; started by torchrun in tests.

Environment: KILLS, a JSON list of [rank, phase, iteration, moment], one for each attempt; CHECKED,
a file to which rank 0 adds what is wrong with the checkpoints when an attempt starts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]


def main() -> int:
    import pretrain_gpt
    from pretraining import checkpoint, trainer
    from pretraining.config import parse

    from tests.faults.killing import Kill, arm, broken_checkpoints

    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if rank == 0:
        folder = Path(parse().config.output) / "checkpoints"
        with open(os.environ["CHECKED"], "a") as out:
            out.write(json.dumps([attempt, broken_checkpoints(folder)]) + "\n")
    kills = [Kill(*values) for values in json.loads(os.environ["KILLS"])]
    if attempt < len(kills) and kills[attempt].rank == rank:
        arm(kills[attempt], {"trainer": trainer, "checkpoint": checkpoint})
    return pretrain_gpt.main()


if __name__ == "__main__":
    sys.exit(main())
