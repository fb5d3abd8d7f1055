"""Stock Megatron-LM takes our specs by two flags: docs/megatron-lm.md."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.small_gpt import Setting
from tests.support.pool import run_ranks
from ulysses_mc import ParallelConfigError, megatron_on_cpu

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")

from megatron.core.extensions.transformer_engine import HAVE_TE  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec, import_module  # noqa: E402

from ulysses_mc.layers import UlyssesCoreAttention  # noqa: E402
from ulysses_mc.layers import specs as ready  # noqa: E402

RECIPE = Path(__file__).resolve().parents[2] / "docs" / "megatron-lm.md"


@pytest.mark.parametrize("name", sorted(ready._SPECS))
def test_imported_as_megatron_lm_imports_it(name: str) -> None:
    """`import_module(args.spec)`: by name, not called, and looked for in vars(module)."""
    vars(ready).pop(name, None)  # as in a fresh process
    if "_te" in name and not HAVE_TE:
        with pytest.raises(ParallelConfigError, match=name.replace("_te", "_local")):
            import_module(("ulysses_mc.layers.specs", name))
        return
    spec = import_module(("ulysses_mc.layers.specs", name))
    assert isinstance(spec, ModuleSpec)
    assert spec is getattr(ready, name)


def recipe_flags() -> list[str]:
    """The two flags as the page gives them."""
    text = RECIPE.read_text()
    line = next(line for line in text.splitlines() if "--spec ulysses_mc" in line)
    return line.strip().rstrip("\\").split()


def build_as_megatron_lm_does(flags: list[str], cp: int) -> None:
    arguments = pytest.importorskip("megatron.training.arguments")
    from megatron.training.argument_utils import gpt_config_from_args

    with megatron_on_cpu():
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        args = parser.parse_args([*flags, "--max-position-embeddings", "32"])
        args.padded_vocab_size, args.rope_scaling = 64, False
        assert args.context_parallel_size == cp
        setting = Setting(cp=cp)
        setting.initialize()
        config = gpt_config_from_args(args, setting.transformer_config())
        model = built(config)
        cores = [m for m in model.modules() if isinstance(m, UlyssesCoreAttention)]
        assert [core.group.size() for core in cores] == [cp] * 4
        others = [name for name, _ in model.named_modules() if name.endswith("core_attention")]
        assert len(others) == 4


def built(config: Any) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.gpt import GPTModelBuilder

    groups = ProcessGroupCollection.use_mpu_process_groups()
    return GPTModelBuilder(config).build_model(groups, pre_process=True, post_process=True)


@pytest.mark.parametrize("name", ["gpt_layer_local", "gpt_layer_te"])
def test_two_flags_wire_every_layer(name: str) -> None:
    pytest.importorskip("megatron.training.argument_utils")  # in the wheel from 0.19 on
    if "_te" in name and not HAVE_TE:
        pytest.skip("TransformerEngine is not installed")
    flags = recipe_flags()
    assert flags[-3:] == ["--spec", "ulysses_mc.layers.specs", "gpt_layer_te"]
    size = flags.index("--context-parallel-size") + 1
    flags[size], flags[-1] = "2", name
    run_ranks(2, build_as_megatron_lm_does, flags, 2, timeout=60)
