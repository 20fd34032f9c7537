"""Packages of the wheel; pyproject.toml has its other settings."""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class Build(build_py):
    """Ships the papers' tables and records, without the code of the benchmarks beside them."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        if package == "lamb_tpu.experiments":
            return []
        return super().find_package_modules(package, package_dir)


setup(
    packages=[*find_packages(include=["lamb_tpu*"]), "lamb_tpu.configs", "lamb_tpu.experiments"],
    # A checkout has the recipes and the tables beside the package, a wheel inside it.
    package_dir={"lamb_tpu.configs": "configs", "lamb_tpu.experiments": "experiments"},
    cmdclass={"build_py": Build},
)
