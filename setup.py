"""The packages of the wheel; everything else about it stands in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["lamb_tpu*"]), "lamb_tpu.configs"],
    # The recipes, which lie beside the package in a checkout, are found inside it by their names.
    package_dir={"lamb_tpu.configs": "configs"},
)
