"""The shipped tables: schedules fit into their runs, and the assumptions of some studies hold."""

import dataclasses
import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest

from lamb_tpu.batching.rules.ramp import seesaw_points
from lamb_tpu.reproduce import engine, jobs
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.loading import folder, load_all
from lamb_tpu.reproduce.tables import Table
from lamb_tpu.run import phases
from lamb_tpu.run.batches import factors
from lamb_tpu.run.recipe import Recipe, resolve
from lamb_tpu.spec import Spec
from tests.shared import shared

TABLES = load_all(folder())
EXAMPLES = 50_000  # examples per epoch; any number works here


def all_jobs(table: Table) -> Iterator[Job]:
    """Yields the first run of each cell with known settings, at each scale except smoke."""
    for scale in table.scales.values():
        for cell in table.cells.values():
            if not cell.unknown and scale.name != "smoke":
                yield Job(table, scale, cell, 0)


def recipes(job: Job) -> list[Recipe]:
    """Returns the recipe, in updates, of each phase of each stage."""
    return [
        resolve(phase.config, EXAMPLES)
        for stage in jobs.stages(job)
        for phase in phases.split(stage.config())
    ]


@pytest.mark.parametrize("key", TABLES)
def test_warm_up_ends_within_the_run(key: str) -> None:
    for job in all_jobs(TABLES[key]):
        for recipe in recipes(job):
            assert recipe.warmup_steps < recipe.total_steps, job.name


@pytest.mark.parametrize("key", TABLES)
def test_microbatches_divide_the_batch(key: str) -> None:
    """The batch size is divisible by accumulation_steps, even if a scale such as smoke changes the batch."""
    table = TABLES[key]
    for scale, cell in itertools.product(table.scales.values(), table.cells.values()):
        if cell.unknown:
            continue
        for stage in jobs.stages(Job(table, scale, cell, 0)):
            for phase in phases.split(stage.config()):
                config = phase.config
                assert config.batch_size % config.accumulation_steps == 0, (scale, cell)


@pytest.mark.parametrize("key", [key for key in TABLES if TABLES[key].tuning is not None])
def test_runs_that_search_have_the_schedule_of_those_that_measure(key: str) -> None:
    """A search's runs are shorter, but the warm-up has the same share of the updates as in measured runs."""
    for job in all_jobs(TABLES[key]):
        if job.cell.tuned_by:
            continue
        searching = engine.searches(job.table, job.scale, job.cell)[0]
        ours, theirs = recipes(job)[-1], recipes(searching)[-1]
        share = ours.warmup_steps / ours.total_steps
        assert theirs.warmup_steps / theirs.total_steps == pytest.approx(
            share,
            abs=1.5 / theirs.total_steps,  # updates are integers
        ), searching.name


def test_rules_carry_the_rate_of_the_small_bert() -> None:
    table = TABLES["bert/scaling"]
    peaks = {}
    for job in all_jobs(table):
        (recipe,), (stage,) = recipes(job), jobs.stages(job)
        config = stage.config()
        assert recipe.total_steps * config.batch_size == 65_536
        assert config.batch_size == 64 * config.accumulation_steps
        share = recipe.warmup_steps / recipe.total_steps
        assert share == pytest.approx(config.batch_size / 64 / 320)
        peaks[job.cell.name] = recipe.peak_learning_rate
    assert peaks["lamb-4096"] == pytest.approx(8 * peaks["lamb-64"])
    assert peaks["adamw-sqrt-1024"] == pytest.approx(4 * peaks["adamw-sqrt-64"])
    assert peaks["adamw-linear-4096"] == pytest.approx(64 * peaks["adamw-sqrt-64"])


def test_rules_carry_the_rate_of_the_lstm_on_mnist() -> None:
    table = TABLES["legw/mnist_lstm"]
    actual = {
        job.cell.name: recipes(job)[0] for job in all_jobs(table) if job.scale.name == "paper"
    }
    factors = {"legw": 8, "same": 1, "linear": 64, "sqrt": 8, "linear-poly": 64, "adam": 1}
    same_at_base = {"linear-128": "same-128", "sqrt-128": "same-128"}
    assert set(actual) | set(same_at_base) == {
        f"{row}-{batch}" for row in factors for batch in (128, 512, 2048, 8192)
    }
    for row, factor in factors.items():
        base = actual[same_at_base.get(f"{row}-128", f"{row}-128")]
        large = actual[f"{row}-8192"]
        assert large.peak_learning_rate == pytest.approx(factor * base.peak_learning_rate)
        # LEGW keeps the number of warm-up updates; at 64 times the batch, these are 64 times the epochs.
        share = {"legw": 64, "linear-poly": 1}.get(row)
        if share is None:
            assert base.warmup_steps == large.warmup_steps == 0
        else:
            assert large.warmup_steps * 64 == pytest.approx(share * base.warmup_steps)


def test_both_optimizers_have_one_recipe_on_tiny_imagenet() -> None:
    table = TABLES["vision/tiny_imagenet"]
    lamb, momentum = (jobs.stages(job)[0].config() for job in all_jobs(table))
    assert lamb != momentum == dataclasses.replace(lamb, optimizer=momentum.optimizer)


def test_phases_of_the_small_bert_before_squad() -> None:
    table = TABLES["bert/end_to_end"]
    pretrained, random = all_jobs(table)
    assert [recipe.total_steps for recipe in recipes(pretrained)[:2]] == [4096, 683]
    first, last = (stage.config() for stage in jobs.stages(pretrained))
    (alone,) = (stage.config() for stage in jobs.stages(random))
    assert [phase.config.data.options["sequence_length"] for phase in phases.split(first)] == [
        128,
        512,
    ]
    # Ignore the path of the vocabulary.
    assert jobs.flat_configs([alone]) == jobs.flat_configs([last])


def small(key: str) -> dict[str, tuple[Spec, Recipe]]:
    """Returns config and recipe of each cell of an MNIST study at the scale small."""
    actual = {}
    for job in all_jobs(TABLES[key]):
        if job.scale.name == "small":
            (stage,) = jobs.stages(job)
            actual[job.cell.name] = stage.config(), resolve(stage.config(), 60_000)
    return actual


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_seesaw_trades_each_halving_of_the_rate_for_a_doubled_batch(optimizer: str) -> None:
    actual = small("batching/seesaw")
    cuts = (240_000, 360_000, 480_000)
    config, seesaw = actual[f"{optimizer}-seesaw"]
    assert config.batch_rule.get("points") == seesaw_points(256, cuts, decay=2.0, granularity=256)
    (_, constant), (_, grow) = actual[f"{optimizer}-256"], actual[f"{optimizer}-grow"]
    peak = constant.peak_learning_rate
    for number, cut in enumerate(cuts, start=1):
        after_cut = cut + 5_000
        assert constant.rate(after_cut // 256) == pytest.approx(peak / 2**number)
        step = next(s for s in range(seesaw.total_steps) if seesaw.examples(s) >= after_cut)
        assert seesaw.batch(step) == grow.batch(step) == 256 * 2**number
        assert seesaw.rate(step) == pytest.approx(peak / 2 ** (number / 2))
        assert grow.rate(step) == pytest.approx(peak)
    # Batch warm-up ends at the batch size and the learning rate of the cell with a constant batch.
    (_, constant), (_, warming) = (
        actual[f"{optimizer}-1024{name}"] for name in ("", "-batch-warm-up")
    )
    assert (warming.batch(0), warming.batch(500)) == (64, 1024)
    assert warming.rate(0) == pytest.approx(constant.rate(0) / 4)
    assert warming.rate(500) == pytest.approx(constant.peak_learning_rate / 2)  # one halving
    # All cells see the same number of examples, up to a partial update.
    for _, recipe in actual.values():
        assert 600_000 <= recipe.examples(recipe.total_steps) < 600_000 + 2_048


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_batches_that_follow_gradients_lie_between_the_constant_ones(optimizer: str) -> None:
    actual = small("batching/mnist")
    _, least = actual[f"{optimizer}-64"]
    _, most = actual[f"{optimizer}-4096"]
    base = {"sgd": 0.025, "adagrad": 0.01}[optimizer]
    assert least.peak_learning_rate == pytest.approx(base)
    changing = {name: pair for name, pair in actual.items() if pair[0].batch_rule.name}
    assert len(changing) == 8
    for name, (config, recipe) in changing.items():
        if not name.startswith(optimizer):
            continue
        rule = config.batch_rule
        assert (recipe.batch(0), rule.get("upper")) == (64, 4096)
        ends = factors(np.array([64, 4096]), rule.get("scaling", "identity"), config.batch_size)
        wanted = [base, base] if "same-rate" in name else [base, most.peak_learning_rate]
        assert recipe.peak_learning_rate * ends == pytest.approx(wanted)


def published() -> Iterator[tuple[Table, str, float, str]]:
    """Yields (table, cell, number, known) for each number of the papers, except for times.

    The digest of the papers gives times only in its text, in other units, or in logs.
    """
    for table in TABLES.values():
        for cell in table.cells.values():
            for key, number in cell.published.items():
                if key not in ("hours", "minutes") and not isinstance(number, str):
                    yield table, cell.name, number, cell.known


def test_published_numbers_are_known_as_the_digest_of_the_papers_says() -> None:
    entries = json.loads(shared("papers", "tables.json").read_text())
    actual = list(published())
    assert len(actual) > 100
    for table, cell, number, known in actual:
        states = {
            entry["provenance"]["status"]
            for entry in entries
            if table.paper.arxiv in entry["paper"]
            for row in entry["rows"]
            for value in row
            # Fractions in the digest are percentages in our tables.
            if isinstance(value, float) and number in (value, pytest.approx(100 * value, abs=5e-6))
        }
        assert states & {known, "mixed"}, (table.key, cell, number, known)
