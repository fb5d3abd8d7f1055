"""The README's code runs, its commands exist, and what it links to is there."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import run_ranks

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def block(name: str) -> str:
    """The Python block under the comment `test: name`."""
    match = re.search(rf"<!-- test: {name} -->\n```python\n(.*?)```", README, re.DOTALL)
    assert match, name
    return match[1]


def run_pytorch_block(code: str) -> int:
    """As one rank with its part of a sequence; returns the number of its tokens."""
    whole = torch.randn(3, 2, 10, 8, 4, generator=torch.Generator().manual_seed(0))
    group = dist.group.WORLD
    part = whole.tensor_split(group.size(), dim=2)[group.rank()]
    names: dict[str, Any] = {
        "group": group, "sequence_length": 10, "batch": {"tokens": torch.arange(10)[None]},
        "query": part[0], "key": part[1], "value": part[2],
    }  # fmt: skip
    exec(code, names)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in whole), is_causal=True
    ).transpose(1, 2)
    mine = expected.tensor_split(group.size(), dim=1)[group.rank()]
    torch.testing.assert_close(names["out"], mine)
    return int(names["batch"]["tokens"].size(1))


def test_the_change_to_a_pytorch_model() -> None:
    assert run_ranks(3, run_pytorch_block, block("pytorch")) == [4, 3, 3]


def run_megatron_block(code: str) -> bool:
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ulysses_mc import megatron_on_cpu
    from ulysses_mc.layers import UlyssesCoreAttention

    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, context_parallel_size=2,
        pipeline_dtype=torch.float32, bias_dropout_fusion=False,
    )  # fmt: skip
    first, second = code.split("spec = ")  # groups exist before seeds are set, seeds before weights
    names: dict[str, Any] = {
        "GPTModel": GPTModel, "config": config,
        "get_gpt_layer_local_spec": get_gpt_layer_local_spec,
        "sequence_length": 16, "batch": {"tokens": torch.arange(16)[None]},
    }  # fmt: skip
    with megatron_on_cpu():
        exec(first, names)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        exec(f"spec = {second}".replace("...", "vocab_size=64, max_sequence_length=16"), names)
    assert names["batch"]["tokens"].tolist() in [
        [[0, 1, 2, 3, 12, 13, 14, 15]], [[4, 5, 6, 7, 8, 9, 10, 11]],
    ]  # fmt: skip
    return any(isinstance(m, UlyssesCoreAttention) for m in names["model"].modules())


@pytest.mark.megatron
def test_the_change_to_a_megatron_model() -> None:
    pytest.importorskip("megatron.core")
    assert all(run_ranks(8, run_megatron_block, block("megatron"), timeout=90))


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"make ([a-z][a-z-]*)", README)) | {"parity", "benchmark", "lint"}
    assert {"pretrain", "test"} <= targets
    for target in sorted(targets - {"and"}):
        done = subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=30
        )
        assert done.returncode == 0, (target, done.stderr)


def test_the_plan_commands_run() -> None:
    match = re.search(r"<!-- test: plan -->\n```bash\n(.*?)```", README, re.DOTALL)
    assert match
    for line in match[1].strip().splitlines():
        command, *arguments = line.split()
        assert command == "ulysses-mc"
        run = subprocess.run(
            [sys.executable, "-m", "ulysses_mc", *arguments],
            cwd=ROOT, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout + run.stderr
        assert run.stdout.strip()


def test_links_and_files_exist() -> None:
    for name in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"examples/[\w/.-]+\.\w+", README):
        assert (ROOT / name).exists(), name


def test_the_small_example_is_under_40_lines_and_agrees_on_any_number_of_ranks() -> None:
    script = ROOT / "examples" / "add_ulysses_to_your_model.py"
    assert len(script.read_text().splitlines()) < 40
    losses = set()
    for ranks in (1, 3):
        done = subprocess.run(
            ["torchrun", "--standalone", "--nproc-per-node", str(ranks), script],
            capture_output=True, text=True, timeout=120, env=environment(),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = re.findall(r"loss (\d+\.\d+)", done.stdout)
        assert len(found) == ranks
        losses |= {round(float(x), 4) for x in found}
    assert len(losses) == 1


def environment() -> dict[str, str]:
    import os
    import sys

    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
