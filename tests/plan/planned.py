"""Plans that no compiler made, for tests of what is done with many of them."""

from collections.abc import Callable

import pytest
from ml_collections import ConfigDict

from lamb_tpu.cost.calibrated import CALIBRATED
from lamb_tpu.cost.timeline import Timeline
from lamb_tpu.cost.topology import topology
from lamb_tpu.errors import UserError
from lamb_tpu.plan import trials
from lamb_tpu.plan.report import Plan
from lamb_tpu.plan.totals import Input, Work
from lamb_tpu.run import recipe

GIB = 2.0**30


def instead(
    monkeypatch: pytest.MonkeyPatch,
    outcome: Callable[[ConfigDict, str], tuple[float, float] | str],
    examples_there: int = 10**7,
) -> list[ConfigDict]:
    """Puts `outcome` in the place of the compiler; returns the configs, in the order of plans.

    It returns GiB and milliseconds of a step of a config on a slice, or why it is refused. A
    device has 15.48 GiB.
    """
    made: list[ConfigDict] = []

    def make_plan(config, name, waiting, examples, cache, gbps):
        del examples, cache, gbps
        made.append(config)
        found = outcome(config, name)
        with waiting("the compiler"):
            if isinstance(found, str):
                raise UserError(found)
        gib, milliseconds = found
        slice_ = topology(name)
        fits = gib * GIB <= slice_.generation.usable
        times = tuple(
            Timeline(milliseconds * 0.9e-3, milliseconds * factor * 0.1e-3, ())
            for factor in (0.5, 1.0, 2.0)
        )
        return Plan(
            topology=slice_,
            mesh={"data": slice_.num_devices},
            hosts=1,
            batch_size=config.batch_size,
            backend=config.parallel.backend,
            compile_seconds=1.0,
            fits=fits,
            needed=gib * GIB,
            calibration=CALIBRATED.for_generation(slice_.version),
            times=times if fits else None,
            recipe=recipe.resolve(config, examples_there),
            work=Work(100, config.batch_size, 1, 0, Input("images", 0, None, "", True)),
        )

    monkeypatch.setattr(trials, "make_plan", make_plan)
    return made
