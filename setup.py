"""Maps the repository's top-level folders into one importable package, `ulysses_mc`."""

from setuptools import setup

PACKAGES = {
    "ulysses_mc": "ulysses_mc",
    "ulysses_mc.parallel_state": "parallel_state",
    "ulysses_mc.layers": "layers",
}

setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    package_data={name: ["py.typed"] for name in PACKAGES},
)
