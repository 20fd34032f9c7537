"""Statistics of gradients in runs: records, resuming, processes, and rejected configs."""

import pathlib
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from lamb_tpu.errors import UserError
from lamb_tpu.run.build import prepare
from lamb_tpu.run.statistics import describe
from lamb_tpu.spec import parse
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny
from tests.parallel.nets import BATCH_NORM, difference
from tests.raising import rejected
from tests.run.test_batches import loading
from tests.run.test_calls import same_end
from tests.test_resume import launched
from tests.test_train import train_in_segments

KEY = "config.statistics"
SHARD_MAP = {"parallel__backend": "shard_map"}
ON = {
    "statistics__noise_scale": True,
    "statistics__preconditioned": True,
    "statistics__halves": True,
    "statistics__modules": (("body", "^hidden"), ("head", "")),
    "statistics__per_example": 16,
    "statistics__interval": 3,
    "accumulation_steps": 4,
}
PARTS = (
    "noise_scale/grad_sq",
    "noise_scale/trace",
    "noise_scale",
    "similarity",
    "similarity/body",
    "similarity/head",
)
EXAMPLES = ("variance", "grad_sq", "inner_product_variance", "orthogonal_variance")


def config(**changes: Any) -> ConfigDict:
    return tiny.digits(**ON | changes)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("measured")
    train(config(), workdir, quiet=True)
    return workdir


@pytest.mark.long
def test_records(measured: pathlib.Path) -> None:
    records = read_records(measured / "metrics.jsonl", "train")
    assert len(records) == 12
    for step, actual in enumerate(records, 1):
        assert set(PARTS) <= set(actual)
        # Adam has no second moments before the first update.
        assert ("noise_scale_preconditioned" in actual) == (step > 1)
        assert [name in actual for name in EXAMPLES] == [step % 3 == 0] * 4
        assert -1 <= actual["similarity"] <= 1 and actual["noise_scale/trace"] > 0
    first = records[0]
    assert first["noise_scale"] == pytest.approx(
        first["noise_scale/trace"] / max(first["noise_scale/grad_sq"], 1e-30)
    )
    assert 0 < float(records[-1]["noise_scale"]) < 10_000


def test_training_equals_that_without_statistics(
    measured: pathlib.Path, trained: pathlib.Path
) -> None:
    actual, _ = tiny.restored(config(), measured)
    expected, _ = tiny.restored(tiny.digits(), trained)
    assert difference(actual.params, expected.params) < 1e-5


@pytest.mark.long
def test_resumed_bit_for_bit(
    measured: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last start resumes from the checkpoint of update 8.
    train_in_segments(monkeypatch, config(), tmp_path, [(3, 2), (5, 6)], fails_at=11)
    same_end(tmp_path, measured, config())
    averages = tiny.restored(config(), tmp_path)[1]["noise_scale"]
    assert set(averages) == {"noise_scale", "noise_scale_preconditioned"}


def test_turned_on_in_the_folder_of_a_run(tmp_path: pathlib.Path) -> None:
    train(tiny.digits(accumulation_steps=4, duration="4 steps"), tmp_path, quiet=True)
    prepare(config(duration="4 steps"), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["jit", "shard_map"])
def test_two_processes_measure_what_one_does(tmp_path: pathlib.Path, backend: str) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(
        "from tests.run import test_statistics\ndef get_config(argument=None):\n"
        f"    return test_statistics.config(parallel__backend={backend!r})\n"
    )
    launched(2, 2, f"--config={file}", f"--workdir={tmp_path / 'two'}")
    done = tiny.command(
        "lamb_tpu.train", f"--config={file}", f"--workdir={tmp_path / 'one'}", devices=4
    )
    assert done.returncode == 0, done.stderr
    two, one = (
        [tiny.untimed(r) for r in read_records(tmp_path / name / "metrics.jsonl", "train")]
        for name in ("two", "one")
    )
    assert len(two) == len(one) == 12
    for actual, expected in zip(two, one, strict=True):
        assert set(PARTS) <= set(actual)
        del actual["kind"], expected["kind"]
        for name, value in expected.items():
            assert actual[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_a_batch_that_changes(tmp_path: pathlib.Path) -> None:
    """The first updates have one microbatch, so there is nothing to compare."""
    rule = ConfigDict({"name": "ramp", "points": ((0, 16), (64, 32))})
    train(config(batch_rule=rule, duration="2 steps"), tmp_path, quiet=True)
    records = read_records(tmp_path / "metrics.jsonl", "train")
    output = [(record["batch_size"], "noise_scale/trace" in record) for record in records]
    assert output and set(output) <= {(16, False), (32, True)} and output[-1] == (32, True)


def test_a_line_about_them() -> None:
    run = prepare(config(), None, jax.devices()[:1])
    assert describe(run.spec, run.mesh) == (
        "statistics of gradients: noise scale from parts of 16 examples, similarity of two halves, "
        "variance of 16 examples every 3 updates"
    )
    assert describe(parse(tiny.digits()), run.mesh) == ""


def on(**changes: Any) -> dict[str, Any]:
    return {f"statistics__{key}": value for key, value in changes.items()}


def grouped(size: int | None) -> ConfigDict:
    """Returns a network with BatchNorm over groups of `size` examples; None: the full batch."""
    return ConfigDict({**BATCH_NORM, "group_size": size})


@pytest.mark.parametrize(
    "devices, changes, fields",
    [
        (1, on(per_example=-1), (f"{KEY}.per_example", -1, "is out of range", "use at least 0")),
        (1, on(interval=0), (f"{KEY}.interval", 0, "is out of range", "use at least 1")),
        (1, on(decay=1.0), (f"{KEY}.decay", 1.0, "", "use at least 0 and below 1")),
        (1, on(noise_scale=1), (f"{KEY}.noise_scale", 1, "wrong type", "use True or False")),
        (1, on(modules=(("body", ""),)), (f"{KEY}.modules", ..., "needs config.statistics.halves")),
        (
            1,
            on(halves=True, modules=(("body", "^hidden"),)) | {"accumulation_steps": 2},
            (f"{KEY}.modules", ..., "no module matches the parameter 'output/bias'"),
        ),
        (
            1,
            on(noise_scale=True),
            (f"{KEY}.noise_scale", True, "compares the parts of a batch", "at least 2, or use"),
        ),
        (8, on(noise_scale=True), (f"{KEY}.noise_scale", True, "there is only one")),
        (1, on(noise_scale=True) | SHARD_MAP, (f"{KEY}.noise_scale", True, "there is only one")),
        (
            1,
            on(halves=True) | {"accumulation_steps": 1},
            (f"{KEY}.halves", True, "compares even and odd microbatches", "even number, such as 2"),
        ),
        (
            3,
            on(halves=True) | SHARD_MAP | {"batch_size": 63},
            (f"{KEY}.halves", True, "3 devices share the batch", "use an even number"),
        ),
        (
            1,
            on(preconditioned=True)
            | {
                "accumulation_steps": 2,
                "optimizer": {"name": "lars", "learning_rate": 1.0, "rules": "no_bias_no_norm"},
            },
            (f"{KEY}.preconditioned", ..., "the optimizer has second moments that do not match"),
        ),
        (1, on(per_example=65), (f"{KEY}.per_example", 65, "is out of range", "use 2 to 64, the")),
        (1, on(per_example=1), (f"{KEY}.per_example", 1, "is out of range", "use 2 to 64, the")),
        (8, on(per_example=12), (f"{KEY}.per_example", 12, "is not divisible by")),
        (
            1,
            on(per_example=8) | {"model": BATCH_NORM},
            (f"{KEY}.per_example", 8, "the model's layer 'norm0' keeps statistics of the batch"),
        ),
        (
            8,
            on(noise_scale=True) | SHARD_MAP | {"model": grouped(16)},
            (
                f"{KEY}.noise_scale",
                True,
                "with config.model.group_size=16 the gradients of 2 devices depend on each other",
                "use a group_size of at most 8",
            ),
        ),
        (
            2,
            on(halves=True) | SHARD_MAP | {"model": grouped(None)},
            (f"{KEY}.halves", True, "config.model.group_size=None", "at most 32"),
        ),
        (
            2,
            on(per_example=8) | {"mesh__model": 2},
            (
                f"{KEY}.per_example",
                8,
                "not support config.mesh.model=2",
                "leave out one of the two",
            ),
        ),
        (
            1,
            {"model": BATCH_NORM, "batch_rule": {"name": "norm_test", "upper": 128, "eta": 0.1}},
            (
                "config.batch_rule.name",
                "norm_test",
                "needs the variance over examples, which needs independent examples, but the model's "
                "layer 'norm0' keeps statistics of the batch",
            ),
        ),
    ],
)
def test_errors(devices: int, changes: dict[str, Any], fields: tuple[Any, ...]) -> None:
    with rejected(*fields):
        prepare(tiny.digits(**changes), None, jax.devices()[:devices])


def test_modules_are_pairs() -> None:
    with pytest.raises(UserError, match=f"^{KEY}.modules="):
        prepare(tiny.digits(**on(halves=True, modules=("body",))), None)


def test_batches_that_cannot_be_split(tmp_path: pathlib.Path) -> None:
    words = tiny.words(tiny.text(tmp_path), **on(noise_scale=True), accumulation_steps=2)
    with rejected(f"{KEY}.noise_scale", True, "but 'lstm_lm' carries a state for each row"):
        prepare(words, None, jax.devices()[:1])

    with rejected(f"{KEY}.noise_scale", True, "is read in batches of similar length, which cannot"):
        prepare(config(), None, jax.devices()[:1], load=loading("buckets"))


def test_pairs_that_are_mixed() -> None:
    task = ConfigDict({"name": "classification", "input_std": 16.0, "mixup_alpha": 0.2})
    with rejected(f"{KEY}.per_example", 8, "config.task.mixup_alpha mixes examples"):
        prepare(tiny.digits(task=task, **on(per_example=8)), None, jax.devices()[:1])
