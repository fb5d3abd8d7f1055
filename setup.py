"""Maps the repository's top-level folders into one importable package, `ulysses_mc`."""

from setuptools import find_packages, setup

FOLDERS = {
    "ulysses_mc": "ulysses_mc",
    "ulysses_mc.parallel_state": "parallel_state",
    "ulysses_mc.layers": "layers",
}

setup(
    packages=[*FOLDERS]
    + [f"{name}.{sub}" for name, folder in FOLDERS.items() for sub in find_packages(folder)],
    package_dir=FOLDERS,
    package_data={"": ["py.typed"]},
)
