"""Tests the table of slices: --help lists the slices, and reading the table does not import JAX."""

import subprocess
import sys

from lamb_tpu.cost import slices
from tests.shared import ROOT


def test_every_size_is_listed() -> None:
    lines = slices.listed().splitlines()
    assert [line.partition("-")[0] for line in lines] == list(slices.GENERATIONS)
    assert "v3-SIZE, in cores: 8, 32, 64, 128, 256, 512, 1024, 2048" in lines
    assert "v5e-SIZE, in chips: 1, 4, 8, 16, 32, 64, 128, 256" in lines


def test_no_jax_is_imported() -> None:
    code = "import sys, lamb_tpu.cost.slices; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_sides_and_slices_that_exist() -> None:
    for version in slices.GENERATIONS:
        sizes = slices.shapes(version)
        assert max(map(max, sizes.values())) <= slices.max_side(version)
    assert slices.max_side("v3") == 32 and slices.max_side("v4") == 256
