"""A wheel, installed away from the repository, is the whole package and asks for torch alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "ulysses_mc": "ulysses_mc",
    "parallel_state": "ulysses_mc/parallel_state",
    "layers": "ulysses_mc/layers",
}
IMPORT = """
import importlib.metadata, json, sys
import ulysses_mc, ulysses_mc.layers, ulysses_mc.layers.local, ulysses_mc.parallel_state
ulysses_mc.shard_batch, ulysses_mc.token_mean_loss  # names are loaded when they are used
ulysses_mc.parallel_state.initialize_model_parallel
loaded = [n for n in ("megatron", "transformer_engine", "deepspeed", "transformers")
          if n in sys.modules]
distribution = importlib.metadata.distribution("ulysses-mc")
(command,) = distribution.entry_points.select(group="console_scripts")
files = [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "ulysses_mc"]
print(json.dumps([loaded, command.name, command.load().__module__, files,
                  str(distribution.locate_file(""))]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the declared backend, offline, from a copy: a build leaves folders behind."""
    pytest.importorskip("setuptools", minversion="70.1")  # older ones need the package `wheel`
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", build, folder], cwd=copy, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:  # what installing a pure wheel does
        archive.extractall(folder / "site")
    return folder / "site"


def test_every_file_of_the_package_is_in_it(installed: Path) -> None:
    expected = {
        Path(place, path.relative_to(ROOT / folder))
        for folder, place in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert sum(path.name == "py.typed" for path in expected) == 3
    files = {p.relative_to(installed) for p in (installed / "ulysses_mc").rglob("*") if p.is_file()}
    assert files == expected
    assert {p.name.split("-")[0] for p in installed.iterdir()} == {"ulysses_mc"}


def test_it_is_imported_without_the_repository_and_without_megatron(installed: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        cwd=installed.parent, env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded, command, module, files, place = json.loads(done.stdout)
    assert loaded == [] and command == "ulysses-mc" and module == "ulysses_mc.cli.main"
    assert len(files) > 10 and all(Path(file).is_relative_to(installed) for file in files)
    assert Path(place) == installed
