"""Programs at the paper's scale: one cell per table is lowered, and ten programs are compiled.

Only programs that the TPU compiler handles within two minutes are compiled; EfficientNet-B5 takes
three minutes and is only lowered. The planner's function `make_plan` uses shapes instead of data.
"""

import functools
import importlib.util
from typing import Any, NamedTuple

import pytest

from lamb_tpu.cost import topology as topology_lib
from lamb_tpu.plan import making
from lamb_tpu.reproduce import jobs
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.loading import folder, load_all
from lamb_tpu.run import phases
from lamb_tpu.run.build import prepare
from lamb_tpu.spec import Spec

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler"),
]

ALL = {key: table for key, table in load_all(folder()).items() if "paper" in table.scales}
# The slice for each table's first runnable cell: the paper's slice, or else the smallest slice of the
# table's hardware. Tables for one machine get four chips. Later stages, which fine-tune, get `_FINE_TUNING`.
SLICES = {
    "efficientnet/table1": "v3-128",
    "efficientnet/table2": "v3-128",
    "lamb/table1": "v3-32",
    "lamb/table2": "v3-32",
    "lamb/exact_match": "v3-32",
    "lamb/adamw16k": "v3-1024",
    "lamb/mixed_batch": "v3-2048",
    "lamb/resnet50": "v3-32",
    "lamb/resnet50_pytorch": "v3-256",
    "lamb/table3": "v3-256",
    "lars/resnet50": "v3-64",
    "lars/resnet50_pytorch": "v3-64",
    "legw/resnet50": "v3-64",
}
_ONE_HOST, _FINE_TUNING = "v5e-4", "v3-32"
# Numbers of training examples that the planner does not know.
_EXAMPLES = {"multi30k": 28_962, "squad": 88_641}


class Program(NamedTuple):
    """A training step: a stage's recipe and overrides, the name of a phase, and a TPU slice."""

    recipe: str
    overrides: tuple[tuple[str, Any], ...]
    phase: str
    slice_: str

    def config(self) -> Spec:
        config = jobs.JobStage(self.recipe, dict(self.overrides)).config()
        return next(each.config for each in phases.split(config) if each.name == self.phase)


def programs(key: str, cell: str) -> list[Program]:
    """Returns the training steps of a cell at the paper's scale."""
    table = ALL[key]
    stages = jobs.stages(Job(table, table.scales["paper"], table.cells[cell], 0))
    return [
        Program(
            stage.recipe,
            tuple(sorted(stage.overrides.items())),
            phase.name,
            _FINE_TUNING if number else SLICES.get(key, _ONE_HOST),
        )
        for number, stage in enumerate(stages)
        for phase in phases.split(stage.config())
    ]


@functools.cache  # tables share some cells
def devices_of(program: Program) -> int:
    """Lowers a training step; returns its number of devices."""
    config = program.config()
    devices = topology_lib.devices(topology_lib.topology(program.slice_))
    load = making.loader(config, _EXAMPLES.get(config.data.name))
    run = prepare(config, None, devices, load=load)
    run.make_train_step(0).lower(run.abstract_state, run.abstract_batch())
    return run.mesh.size


@pytest.mark.parametrize("key", ALL)
def test_every_table_is_lowered_for_its_slice(key: str) -> None:
    cell = next(cell for cell in ALL[key].cells.values() if not cell.unknown)
    for program in programs(key, cell.name):
        assert devices_of(program) == topology_lib.topology(program.slice_).num_devices


@pytest.mark.parametrize(
    "key, cell, number, slice_",
    [
        ("lamb/table1", "lamb-32k", 0, "v3-2048"),  # phase 1
        ("lamb/table1", "lamb-32k", 2, _FINE_TUNING),
        ("lamb/resnet50", "lamb-32768", 0, "v3-2048"),
        ("efficientnet/table1", "b2-1024-cores", 0, "v3-1024"),
        ("lamb/mnist", "lamb", 0, _ONE_HOST),
        ("lamb/cifar10", "lamb", 0, _ONE_HOST),
        ("legw/mnist_lstm", "legw-128", 0, _ONE_HOST),
        ("legw/ptb_small", "legw-20", 0, _ONE_HOST),
        ("legw/ptb_large", "legw-20", 0, _ONE_HOST),
        ("legw/multi30k", "legw-64", 0, _ONE_HOST),
    ],
)
def test_every_network_compiles_and_fits(key: str, cell: str, number: int, slice_: str) -> None:
    config = programs(key, cell)[number].config()
    plan = making.make_plan(config, slice_, examples=_EXAMPLES.get(config.data.name))
    assert plan.fits, plan.describe()
