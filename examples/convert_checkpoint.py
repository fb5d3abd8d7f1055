"""Converts checkpoints of examples/pretrain_gpt.py to and from Hugging Face safetensors (Llama).

    python examples/convert_checkpoint.py to-hf runs/pretrain/checkpoints runs/llama
    python examples/convert_checkpoint.py from-hf runs/llama runs/converted

Weights are copied bit by bit, at whatever tensor, pipeline or Ulysses size they were saved. The
second command also writes runs/converted/model.yaml; a run goes on from there with

    --config runs/converted/model.yaml --checkpoint.load runs/converted/checkpoints

One process, on the CPU, with memory for the whole model twice.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pretraining.errors import UserError


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("direction", choices=["to-hf", "from-hf"])
    parser.add_argument("source", type=Path, help="checkpoints, iter_XXXXXXX, or a model's folder")
    parser.add_argument("target", type=Path, help="a new folder")
    words = parser.parse_args()
    from pretraining import conversion

    convert = conversion.to_hf if words.direction == "to-hf" else conversion.from_hf
    try:
        with conversion.one_rank():
            print(convert(words.source, words.target))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
