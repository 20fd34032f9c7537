"""The batch rule of a config and its effect on the recipe."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu import data
from lamb_tpu.batching.rules import RULES
from lamb_tpu.config import flatten
from lamb_tpu.errors import UserError
from lamb_tpu.run import batches, memory
from lamb_tpu.run.build import prepare
from lamb_tpu.run.optimizer import resolve_optimizer
from lamb_tpu.run.recipe import Recipe, resolve
from lamb_tpu.spec import parse
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny
from tests.raising import rejected

POINTS = ((0, 16), (64, 32), (192, 128))
SIZES = [16] * 4 + [32] * 4 + [128] * 4 + [64]


def ramp(points: Any = POINTS, **changes: Any) -> ConfigDict:
    """Returns a config of 768 examples in 13 updates, with batches that are multiples of 16."""
    rule = {"name": "ramp", "points": points}
    rule |= {key: changes.pop(key) for key in ("scaling", "linear", "interval") if key in changes}
    values = {"accumulation_steps": 4, "batch_rule": ConfigDict(rule)}
    return tiny.digits(**values | changes)


def of(config: ConfigDict) -> Recipe:
    return resolve(config, 256)


def test_a_constant_batch_is_unchanged() -> None:
    base = of(tiny.digits())
    named = of(tiny.digits(batch_rule=ConfigDict({"name": "constant"})))
    assert base.path is None and named.path is None
    rates = base.learning_rates.tolist()
    for recipe in (base, named):
        assert [recipe.batch(5), recipe.examples(5), recipe.place(5)] == [64, 320, 5]
        assert recipe.epoch(5) == 1.25 and recipe.largest_batch == 64
        assert recipe.rule is None and not recipe.decides and recipe.rate(5) == rates[5]
    # The config of a constant batch has no key batch_rule, like configs of older versions.
    assert not [key for key in flatten(tiny.digits()) if key.startswith("batch_rule")]


def test_a_ramp_at_the_base_batch_equals_a_constant_batch() -> None:
    base, flat = of(tiny.digits()), of(ramp(points=((0, 64),), scaling="linear"))
    assert flat.path is not None and flat.total_steps == base.total_steps == 12
    np.testing.assert_array_equal(flat.learning_rates, base.learning_rates)
    for step in range(1, 13):
        assert flat.epoch(step) == base.epoch(step)
        for every in (1.0, 4.0, 2.5):
            assert flat.is_due(every, step) == base.is_due(every, step)


@pytest.mark.parametrize("scaling, power", [("identity", 0.0), ("sqrt", 0.5), ("linear", 1.0)])
def test_the_schedule_runs_on_examples(scaling: str, power: float) -> None:
    recipe = of(ramp(scaling=scaling))
    assert recipe.path is not None and recipe.path.batches().tolist() == SIZES
    assert recipe.total_steps == 13 and recipe.examples(13) == 768 and recipe.epoch(13) == 3.0
    before = np.cumsum(SIZES) - SIZES
    # Warm-up to 0.02 over 256 examples, then linear decay to 0 at 768.
    rates = np.where(before < 256, 0.02 * before / 256, 0.02 * (768 - before) / 512)
    rates *= (np.array(SIZES) / 64) ** power
    np.testing.assert_allclose(recipe.learning_rates, rates, rtol=1e-6)
    assert recipe.learning_rates.dtype == np.float32


def test_intervals_run_on_examples() -> None:
    recipe = of(ramp())
    due = [step for step in range(1, 14) if recipe.is_due(2.0, step)]  # every 128 examples
    assert [recipe.examples(step) for step in due] == [128, 320, 448, 576, 704, 768]
    assert [recipe.place(step) for step in (4, 6, 13)] == [1.0, 2.0, 12.0]


def test_the_settings_show_the_path() -> None:
    output = of(ramp(scaling="sqrt")).describe()
    assert "run: 13 updates of 16 to 128 examples = 3 epochs of 256\n" in output
    assert (
        "batch: 16, 32 from update 4 (64 examples), 128 from update 8 (192 examples), 64 from "
        "update 12 (704 examples); durations and schedule count updates of 64 examples, and the "
        "learning rate scales by 'sqrt'\n"
    ) in output


def test_the_optimizer_uses_the_rate_of_the_step() -> None:
    recipe = of(ramp())
    tx = resolve_optimizer(parse(ramp()).optimizer).make(recipe)
    params = {"w": np.ones(3, np.float32)}
    updates, _ = tx.update(params, tx.init(params), params)
    assert np.isnan(updates["w"]).all()  # the caller must give the rate


@pytest.mark.parametrize(
    "rule, message",
    [
        ({"name": "rmap"}, ".name='rmap' is unknown; use constant, ramp,"),
        ({"points": POINTS}, ".points is unknown; batch rule 'constant' has: name$"),
        ({"name": "ramp"}, ".points is missing; set it, because batch rule"),
        (
            {"name": "ramp", "pionts": POINTS},
            ".pionts is unknown; batch rule 'ramp' has: name, interval, points, linear, scaling; did "
            r"you mean config.batch_rule.points\?$",
        ),
        ({"name": "ramp", "points": POINTS, "granularity": 8}, ".granularity is unknown"),
        (
            {"name": "ramp", "points": POINTS, "scaling": "cubic"},
            ".scaling='cubic' is unknown; use identity, linear or sqrt",
        ),
        (
            {"name": "ramp", "points": ((0, 24),)},
            r".points\[0\]\[1\]=24 must be a multiple of the batch granularity 16; use 16 or 32 .the "
            "granularity is one microbatch, config.batch_size / config",
        ),
        (
            {"name": "ramp", "points": ((0, 16), (192, 32), (64, 128))},
            r".points=.* must have strictly increasing numbers of examples",
        ),
        ({"name": "ramp", "points": 3}, ".points=3 has the wrong type; use a tuple of"),
        ({"name": "simigrad", "upper": 128}, ".target is missing; set it, because batch rule"),
        ({"name": "simigrad"}, ".upper and config.batch_rule.target are missing;"),
        (
            {"name": "simigrad", "target": 0.9, "upper": 144},
            ".upper=144 must be a multiple of the batch granularity 32; use 128 or 160 .the "
            r"granularity is two microbatches, 2 \* config.batch_size / config.accumul",
        ),
        (
            {"name": "norm_test", "eta": 0.9, "upper": 100},
            ".upper=100 must be a multiple of the batch granularity 16; use 96 or 112 .the "
            "granularity is one microbatch, config",
        ),
        (
            {"name": "noise_scale", "lower": 256, "upper": 128},
            ".lower=256 must be at most upper=128",
        ),
        (
            {"name": "noise_scale", "lower": 128, "upper": 256},
            "config.batch_size=64 is outside the bounds of config.batch_rule, 128 to 256; use a "
            "batch size within them, or change config.batch_rule.lower or upper",
        ),
        (
            {"name": "norm_test", "eta": 0.5, "upper": 48},
            "config.batch_size=64 is outside the bounds of config.batch_rule, 16 to 48; use",
        ),
        (
            {"name": "norm_test", "eta": 0.5, "upper": 64, "interval": 0},
            ".interval=0 must be a whole number of at least 1",
        ),
        (
            {"name": "norm_test", "eta": "0.5", "upper": 64},
            ".eta='0.5' has the wrong type; use a number",
        ),
    ],
)
def test_errors_in_the_rule(rule: dict[str, Any], message: str) -> None:
    config = tiny.digits(accumulation_steps=4, batch_rule=ConfigDict(rule))
    start = "" if message.startswith("config.") else "config.batch_rule"
    with pytest.raises(UserError, match=f"^{start}{message}"):
        prepare(config, None, jax.devices()[:1])


@pytest.mark.parametrize("name", ["simigrad", "noise_scale"])
def test_parts_of_a_batch_under_jit_are_pairs_of_microbatches(name: str) -> None:
    fields = {"simigrad": {"target": 0.9}, "noise_scale": {}}[name]
    rule = ConfigDict({"name": name, "upper": 128, **fields})
    for steps in (1, 4):
        config = tiny.digits(batch_rule=rule, accumulation_steps=steps)
        if steps == 1:
            problem = f"is odd, but config.batch_rule.name='{name}' compares pairs of microbatches"
            with rejected("config.accumulation_steps", 1, problem, "use an even number, such as 2"):
                of(config)
        else:
            assert of(config).rule.granularity == 32
        config.parallel.backend = "shard_map"
        assert of(config).rule.granularity == 64 // steps


def test_one_device_has_no_parts_to_compare() -> None:
    config = tiny.digits(
        batch_rule=ConfigDict({"name": "noise_scale", "upper": 128}), parallel__backend="shard_map"
    )
    prepare(config, None, jax.devices()[:2])
    problem = "compares devices for config.batch_rule.name='noise_scale', but there is only one "
    with rejected("config.parallel.backend", "shard_map", problem, "use 'jit', which compares"):
        prepare(config, None, jax.devices()[:1])


def test_the_statistics_of_every_rule() -> None:
    examples = {"variance", "grad_sq", "inner_product_variance", "orthogonal_variance"}
    measured = {"noise_scale": {"noise_scale"}, "halves": {"similarity"}, "per_example": examples}
    values = {"target": 0.9, "eta": 0.5, "theta": 0.5, "nu": 2.0, "points": ((0, 64),)}
    values |= {"upper": 128, "interval": 7, "decay": 0.5}
    for name, rule in RULES.items():
        fields = {key: values[key] for key in RULES.keys_of(name) if key in values}
        config = tiny.digits(batch_rule=ConfigDict({"name": name, **fields}), accumulation_steps=4)
        actual = batches.required_statistics(parse(config))
        assert {each for key in actual for each in measured.get(key, ())} >= set(rule.needs)
        assert bool(actual) == bool(rule.needs)
        if "per_example" in actual:
            assert actual == {"per_example": 16, "interval": 7}
        if "noise_scale" in actual:
            assert actual == {"noise_scale": True, "decay": 0.5}


def test_the_settings_show_the_decisions() -> None:
    rule = ConfigDict({"name": "simigrad", "target": 0.9, "lower": 32, "upper": 512, "interval": 9})
    output = of(tiny.digits(batch_rule=rule, accumulation_steps=4)).describe()
    assert "run: updates of 32 to 512 examples = 3 epochs of 256\n" in output
    assert (
        "batch: 64, then decided after every 9 updates from similarity; durations and schedule "
        "count updates of 64 examples, and the learning rate scales by 'identity'\n"
    ) in output


def test_rates_of_a_path_that_grows() -> None:
    """A path that grows during the run gives the same learning rates as a path known from the start."""
    points = ((0, 64), (64 * 5000, 16), (64 * 6000, 128))
    known = of(ramp(points, duration="9000 steps", scaling="sqrt"))
    rule = ConfigDict({"name": "norm_test", "eta": 0.5, "upper": 512, "scaling": "sqrt"})
    grown = of(tiny.digits(batch_rule=rule, accumulation_steps=4, duration="9000 steps"))
    assert grown.total_steps == 9000 and known.total_steps == 5000 + 4000 + 1500
    asked = [0, 4095, 4096, 4999, 5000, 8191, 8192, 8999, 9000, 10_499]
    for step in asked:
        for first, size in ((5000, 16), (9000, 128)):
            if step == first:
                grown = dataclasses.replace(grown, path=grown.path.change(step, size))
        assert grown.rate(step) == known.rate(step) == known.learning_rates[step]
    assert grown.total_steps == known.total_steps == len(known.learning_rates)
    np.testing.assert_array_equal(grown.learning_rates, known.learning_rates)


def test_a_log_of_one_batch_size() -> None:
    changes = {"log__mlperf": True, "target__metric": "accuracy", "target__value": 0.5}
    rule = ConfigDict({"name": "noise_scale", "upper": 128})
    for config in (ramp(**changes), tiny.digits(batch_rule=rule, accumulation_steps=2, **changes)):
        problem = f"which config.batch_rule.name='{config.batch_rule.name}' changes"
        with rejected("config.log.mlperf", True, problem, "use False"):
            prepare(config, None, jax.devices()[:1])


def test_a_network_with_a_carry(tmp_path: pathlib.Path) -> None:
    config = tiny.words(
        tiny.text(tmp_path), batch_rule=ConfigDict({"name": "ramp", "points": ((0, 8), (64, 16))})
    )
    problem = "the network 'lstm_lm' carries a state for each row of the batch"
    with rejected("config.batch_rule.name", "ramp", problem, "leave config.batch_rule empty"):
        prepare(config, None, jax.devices()[:1])


def loading(field: str) -> Callable[..., Any]:
    """Returns a function `load` that sets the attribute `field`, 'buckets' or 'streams', of training sets."""

    def load(*args: Any, **kwargs: Any) -> Any:
        source = data.load(*args, **kwargs)
        if kwargs["training"]:
            setattr(source, field, np.zeros(len(source), np.int64) if field == "buckets" else 64)
        return source

    return load


@pytest.mark.parametrize(
    "field, what", [("buckets", "batches of similar length"), ("streams", "streams of text")]
)
def test_data_of_one_batch_size(field: str, what: str) -> None:
    with rejected("config.batch_rule.name", "ramp", f"is read in {what}, which need"):
        prepare(ramp(), None, jax.devices()[:1], load=loading(field))


def test_the_largest_batch_must_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_bytes", lambda: 2**20)
    prepare(ramp(), None, jax.devices()[:1])
    grown = ramp(points=((0, 16), (64, 2**14)), duration="1000 steps")
    with rejected("config.batch_size", problem="16,384 examples of a batch need"):
        prepare(grown, None, jax.devices()[:1])


@pytest.mark.long
def test_a_phase_may_have_a_rule(tmp_path: pathlib.Path) -> None:
    rule = ConfigDict({"name": "ramp", "points": ((0, 16), (64, 32))})
    config = tiny.digits(
        accumulation_steps=4,
        duration="2 steps",
        phases=ConfigDict({"1": {"batch_rule": rule}, "2": {"duration": "1 steps"}}),
    )
    train(config, tmp_path, quiet=True)
    counts = [
        len(read_records(tmp_path / phase / "metrics.jsonl", "train")) for phase in ("1", "2")
    ]
    assert counts == [2, 1]  # records every 64 examples; the first phase has 6 updates
    first = read_records(tmp_path / "1" / "metrics.jsonl", "train")
    assert [record["step"] for record in first] == [4, 6]


def test_fields_of_every_rule() -> None:
    assert set(RULES.keys_of("constant")) == {"name"}
    fields = RULES.keys_of("noise_scale")
    assert {"name", "interval", "upper", "lower", "factor", "decay", "scaling"} == set(fields)
    assert fields["factor"] == (float, 1.0)
