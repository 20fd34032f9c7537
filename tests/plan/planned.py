"""Replaces the compiler with a function, for tests of searches over many plans."""

import importlib.util
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
from lamb_tpu.plan.variants import Variants
from lamb_tpu.run import recipe
from lamb_tpu.spec import Spec, parse
from tests import tiny

CONFIGS = tiny.ROOT / "configs"
GIB = 2.0**30
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="no TPU compiler here"
)


def config_of(text: str) -> ConfigDict:
    """Returns the config of a recipe in `CONFIGS`, such as 'digits.py:batch=64'."""
    path, _, argument = text.partition(":")
    return tiny.recipe_file(CONFIGS / path).get_config(argument)


def variants(text: str, **changes: object) -> Variants:
    """Returns the variants of a recipe with changed keys; '__' in a keyword means a dot in the key."""
    values = {key.replace("__", "."): value for key, value in changes.items()}
    return Variants(f"{CONFIGS}/{text}", parse(tiny.change(config_of(text), values)))


def instead(
    monkeypatch: pytest.MonkeyPatch,
    outcome: Callable[[Spec, str], tuple[float, float] | str],
    examples_there: int = 10**7,
) -> list[Spec]:
    """Replaces the compiler with `outcome`; returns a list that receives each planned config.

    Args:
      monkeypatch: pytest's fixture.
      outcome: maps a config and a slice's name to the GiB and milliseconds of a step, or to an error
        text, which rejects the config. A device of v3 has 15.48 GiB.
      examples_there: number of training examples.
    """
    made: list[Spec] = []

    def make_plan(config, name, waiting, cache=None):
        del cache
        made.append(config)
        actual = outcome(config, name)
        with waiting("the compiler"):
            if isinstance(actual, str):
                raise UserError("the step", problem=actual)
        gib, milliseconds = actual
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
