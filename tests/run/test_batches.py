"""The batch rule of a config, and the recipe that it makes."""

import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.batching.rules import RULES
from lamb_tpu.config import flatten
from lamb_tpu.errors import UserError
from lamb_tpu.run import batches, memory
from lamb_tpu.run.build import prepare
from lamb_tpu.run.recipe import Recipe, resolve, resolve_optimizer
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny

POINTS = ((0, 16), (64, 32), (192, 128))
SIZES = [16] * 4 + [32] * 4 + [128] * 4 + [64]


def ramp(points: Any = POINTS, **changes: Any) -> ConfigDict:
    """768 examples in 13 updates, in quanta of 16."""
    rule = {"name": "ramp", "points": points}
    rule |= {key: changes.pop(key) for key in ("scaling", "linear", "interval") if key in changes}
    values = {"accumulation_steps": 4, "batch_rule": ConfigDict(rule)}
    return tiny.digits(**values | changes)


def of(config: ConfigDict) -> Recipe:
    return resolve(config, 256)


def test_a_constant_batch_is_what_it_was() -> None:
    base = of(tiny.digits())
    named = of(tiny.digits(batch_rule=ConfigDict({"name": "constant"})))
    assert base.path is None and named.path is None
    rates = base.learning_rates.tolist()
    for recipe in (base, named):
        assert [recipe.batch(5), recipe.examples(5), recipe.place(5)] == [64, 320, 5]
        assert recipe.epoch(5) == 1.25 and recipe.largest_batch == 64
        assert recipe.rule is None and not recipe.decides and recipe.rate(5) == rates[5]
    # Folders and records of older versions have no such key.
    assert not [key for key in flatten(tiny.digits()) if key.startswith("batch_rule")]


def test_a_ramp_that_stays_at_the_base_batch_has_its_numbers() -> None:
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
    # Warm-up over 256 examples to 0.02, then linearly to 0 at 768.
    rates = np.where(before < 256, 0.02 * before / 256, 0.02 * (768 - before) / 512)
    rates *= (np.array(SIZES) / 64) ** power
    np.testing.assert_allclose(recipe.learning_rates, rates, rtol=1e-6)
    assert recipe.learning_rates.dtype == np.float32


def test_intervals_run_on_examples() -> None:
    recipe = of(ramp())
    due = [step for step in range(1, 14) if recipe.is_due(2.0, step)]  # every 128 examples
    assert [recipe.examples(step) for step in due] == [128, 320, 448, 576, 704, 768]
    assert [recipe.place(step) for step in (4, 6, 13)] == [1.0, 2.0, 12.0]


def test_the_start_tells_the_path() -> None:
    told = of(ramp(scaling="sqrt")).describe()
    assert "run: 13 updates of 16 to 128 examples = 3 epochs of 256\n" in told
    assert (
        "batch: 16, 32 from update 4 (64 examples), 128 from update 8 (192 examples), 64 from "
        "update 12 (704 examples); durations and schedule count updates of 64 examples, and the "
        "rate follows by 'sqrt'\n"
    ) in told


def test_the_optimizer_reads_the_rate_that_the_step_is_given() -> None:
    recipe = of(ramp())
    tx, _ = resolve_optimizer(ramp(), recipe)
    params = {"w": np.ones(3, np.float32)}
    updates, _ = tx.update(params, tx.init(params), params)
    assert np.isnan(updates["w"]).all()  # nobody gives one here


@pytest.mark.parametrize(
    "rule, message",
    [
        ({"name": "rmap"}, r"config\.batch_rule\.name is 'rmap'; known: constant, ramp, simigrad"),
        (
            {"points": POINTS},
            r"config\.batch_rule\.points is unknown; the rule 'constant' has: name$",
        ),
        ({"name": "ramp"}, r"config\.batch_rule\.points is missing; the rule 'ramp' needs it"),
        (
            {"name": "ramp", "pionts": POINTS},
            r"config\.batch_rule\.pionts is unknown; the rule 'ramp' has: name, interval, points, linear, "
            "scaling",
        ),
        (
            {"name": "ramp", "points": POINTS, "quantum": 8},
            r"config\.batch_rule\.quantum is unknown",
        ),
        (
            {"name": "ramp", "points": POINTS, "scaling": "cubic"},
            r"config\.batch_rule\.scaling is 'cubic'; known: identity, linear, sqrt",
        ),
        (
            {"name": "ramp", "points": ((0, 24),)},
            r"config\.batch_rule: the batch at 0 examples must be a whole number of quanta of 16 examples,"
            r" as 16 or 32, not 24; a quantum is a microbatch, config\.batch_size / config\.accumulation",
        ),
        (
            {"name": "ramp", "points": ((0, 16), (192, 32), (64, 128))},
            r"config\.batch_rule: points must begin at 0 examples and then rise, not \[0, 192, 64\]",
        ),
        ({"name": "ramp", "points": 3}, r"config\.batch_rule: points must be pairs"),
        (
            {"name": "simigrad", "upper": 128},
            r"config\.batch_rule\.target is missing; the rule 'simigrad' needs it",
        ),
        (
            {"name": "simigrad"},
            r"upper and config\.batch_rule\.target are missing; the rule 'simigrad' needs them",
        ),
        (
            {"name": "simigrad", "target": 0.9, "upper": 144},
            r"config\.batch_rule: upper must be a whole number of quanta of 32 examples, as 128 or 160, "
            r"not 144; a quantum is two microbatches of config\.batch_size / config\.accumulation_steps$",
        ),
        (
            {"name": "norm_test", "eta": 0.9, "upper": 100},
            "upper must be a whole number of quanta of 16 examples, as 96 or 112, not 100; a quantum is a "
            "microbatch, config",
        ),
        (
            {"name": "noise_scale", "lower": 256, "upper": 128},
            r"config\.batch_rule: lower must be at most upper, 128, not 256",
        ),
        (
            {"name": "noise_scale", "lower": 128, "upper": 256},
            r"config\.batch_size is 64, with which training begins, and config\.batch_rule keeps batches "
            r"between 128 and 256; begin with one of these, or change config\.batch_rule\.lower or upp",
        ),
        (
            {"name": "norm_test", "eta": 0.5, "upper": 48},
            r"config\.batch_size is 64, with which .* between 16 and 48; begin",
        ),
        (
            {"name": "norm_test", "eta": 0.5, "upper": 64, "interval": 0},
            r"config\.batch_rule: interval must be a whole number of at least 1, not 0",
        ),
        (
            {"name": "norm_test", "eta": "0.5", "upper": 64},
            r"config\.batch_rule: eta must be above 0, not '0\.5'",
        ),
    ],
)
def test_mistakes_in_the_rule(rule: dict[str, Any], message: str) -> None:
    config = tiny.digits(accumulation_steps=4, batch_rule=ConfigDict(rule))
    with pytest.raises(UserError, match=message):
        prepare(config, None, jax.devices()[:1])


@pytest.mark.parametrize("name", ["simigrad", "noise_scale"])
def test_parts_of_a_batch_under_jit_are_pairs_of_microbatches(name: str) -> None:
    fields = {"simigrad": {"target": 0.9}, "noise_scale": {}}[name]
    rule = ConfigDict({"name": name, "upper": 128, **fields})
    for steps in (1, 4):
        config = tiny.digits(batch_rule=rule, accumulation_steps=steps)
        if steps == 1:
            with pytest.raises(
                UserError,
                match=(
                    r"^config\.accumulation_steps is 1, and the rule config\.batch_rule\.name="
                    rf"'{name}' compares microbatches under config\.parallel\.backend='jit'; it must "
                    r"be even, such as 2$"
                ),
            ):
                of(config)
        else:
            assert of(config).rule.quantum == 32
        config.parallel.backend = "shard_map"
        assert of(config).rule.quantum == 64 // steps


def test_one_device_has_no_parts_to_compare() -> None:
    config = tiny.digits(
        batch_rule=ConfigDict({"name": "noise_scale", "upper": 128}), parallel__backend="shard_map"
    )
    prepare(config, None, jax.devices()[:2])
    with pytest.raises(
        UserError,
        match=(
            r"^the rule config\.batch_rule\.name='noise_scale' compares the devices under config\."
            r"parallel\.backend='shard_map', and there is one; take 'jit', which compares micro"
        ),
    ):
        prepare(config, None, jax.devices()[:1])


def test_the_statistics_of_every_rule() -> None:
    """A rule turns on all statistics that it reads."""
    examples = {"variance", "grad_sq", "inner_product_variance", "orthogonal_variance"}
    measured = {"noise_scale": {"noise_scale"}, "halves": {"similarity"}, "per_example": examples}
    values = {"target": 0.9, "eta": 0.5, "theta": 0.5, "nu": 2.0, "points": ((0, 64),)}
    values |= {"upper": 128, "interval": 7, "decay": 0.5}
    for name, rule in RULES.items():
        fields = {key: values[key] for key in batches.rule_fields(name) if key in values}
        found = batches.required_statistics(
            tiny.digits(batch_rule=ConfigDict({"name": name, **fields}), accumulation_steps=4)
        )
        assert {each for key in found for each in measured.get(key, ())} >= set(rule.needs)
        assert bool(found) == bool(rule.needs)
        if "per_example" in found:
            assert found == {"per_example": 16, "interval": 7}
        if "noise_scale" in found:
            assert found == {"noise_scale": True, "decay": 0.5}


def test_the_start_tells_what_is_decided() -> None:
    rule = ConfigDict({"name": "simigrad", "target": 0.9, "lower": 32, "upper": 512, "interval": 9})
    told = of(tiny.digits(batch_rule=rule, accumulation_steps=4)).describe()
    assert "run: updates of 32 to 512 examples = 3 epochs of 256\n" in told
    assert (
        "batch: 64, then decided after 9 updates each from similarity; durations and schedule "
        "count updates of 64 examples, and the rate follows by 'identity'\n"
    ) in told


def test_rates_of_a_path_that_grows() -> None:
    """They are those of the same path known from the start, whatever was asked before."""
    points = ((0, 64), (64 * 5000, 16), (64 * 6000, 128))
    known = of(ramp(points, duration="9000 steps", scaling="sqrt"))
    rule = ConfigDict({"name": "norm_test", "eta": 0.5, "upper": 512, "scaling": "sqrt"})
    grown = of(tiny.digits(batch_rule=rule, accumulation_steps=4, duration="9000 steps"))
    assert grown.total_steps == 9000 and known.total_steps == 5000 + 4000 + 1500
    asked = [0, 4095, 4096, 4999, 5000, 8191, 8192, 8999, 9000, 10_499]
    for step in asked:
        for first, size in ((5000, 16), (9000, 128)):
            if step == first:
                grown.path.change(step, size)
        assert grown.rate(step) == known.rate(step) == known.learning_rates[step]
    assert grown.total_steps == known.total_steps == len(known.learning_rates)
    np.testing.assert_array_equal(grown.learning_rates, known.learning_rates)


def test_a_log_of_one_batch_size() -> None:
    changes = {"log__mlperf": True, "target__metric": "accuracy", "target__value": 0.5}
    rule = ConfigDict({"name": "noise_scale", "upper": 128})
    for config in (ramp(**changes), tiny.digits(batch_rule=rule, accumulation_steps=2, **changes)):
        told = f"'{config.batch_rule.name}', and MLPerf's log has one batch size; .*=False$"
        with pytest.raises(UserError, match=told):
            prepare(config, None, jax.devices()[:1])


def test_a_network_with_a_carry(tmp_path: pathlib.Path) -> None:
    config = tiny.words(
        tiny.text(tmp_path), batch_rule=ConfigDict({"name": "ramp", "points": ((0, 8), (64, 16))})
    )
    with pytest.raises(UserError, match="'lstm_lm' carries a state for each row of the batch"):
        prepare(config, None, jax.devices()[:1])


@pytest.mark.parametrize(
    "field, what", [("buckets", "batches of like lengths"), ("streams", "streams of text")]
)
def test_data_of_one_batch_size(field: str, what: str) -> None:
    def load(*args: Any, **kwargs: Any) -> Any:
        from lamb_tpu import data

        source = data.load(*args, **kwargs)
        if kwargs["training"]:
            setattr(source, field, np.zeros(len(source), np.int64) if field == "buckets" else 64)
        return source

    with pytest.raises(UserError, match=f"changes the batch, and .* is read in {what}, which"):
        prepare(ramp(), None, jax.devices()[:1], load=load)


def test_the_largest_batch_must_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_bytes", lambda: 2**20)
    prepare(ramp(), None, jax.devices()[:1])
    grown = ramp(points=((0, 16), (64, 2**14)), duration="1000 steps")
    with pytest.raises(UserError, match="16,384 examples of a batch need"):
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
    assert set(batches.rule_fields("constant")) == {"name"}
    fields = batches.rule_fields("noise_scale")
    assert {"name", "interval", "upper", "lower", "factor", "decay", "scaling"} == set(fields)
    assert fields["factor"] == (float, 1.0)
