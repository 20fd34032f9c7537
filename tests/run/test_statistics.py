"""Statistics of gradients in runs: records, resumes, processes, and what is refused."""

import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from lamb_tpu.errors import UserError
from lamb_tpu.run.build import prepare
from lamb_tpu.run.statistics import describe
from lamb_tpu.store.metrics import read_records
from lamb_tpu.train import train
from tests import tiny
from tests.parallel.nets import BATCH_NORM, difference
from tests.test_resume import launched
from tests.test_train import train_in_pieces, without_seconds

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
    for step, found in enumerate(records, 1):
        assert set(PARTS) <= set(found)
        # Adam's second moments begin with the first update.
        assert ("noise_scale_preconditioned" in found) == (step > 1)
        assert [name in found for name in EXAMPLES] == [step % 3 == 0] * 4
        assert -1 <= found["similarity"] <= 1 and found["noise_scale/trace"] > 0
    first = records[0]
    assert first["noise_scale"] == pytest.approx(
        first["noise_scale/trace"] / max(first["noise_scale/grad_sq"], 1e-30)
    )
    assert 0 < float(records[-1]["noise_scale"]) < 10_000


def test_training_is_that_without_statistics(measured: pathlib.Path, trained: pathlib.Path) -> None:
    found, _ = tiny.restored(config(), measured)
    expected, _ = tiny.restored(tiny.digits(), trained)
    assert difference(found.params, expected.params) < 1e-5


@pytest.mark.long
def test_resumed_bit_for_bit(
    measured: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last one goes back to the checkpoint of update 8.
    train_in_pieces(monkeypatch, config(), tmp_path, [(3, 2), (5, 6)], fails_at=11)
    (found, position), (expected, other) = (
        tiny.restored(config(), folder) for folder in (tmp_path, measured)
    )
    tiny.assert_equal(found, expected)
    assert position["noise_scale"] == other["noise_scale"]
    assert set(position["noise_scale"]) == {"noise_scale", "noise_scale_preconditioned"}
    assert without_seconds(tmp_path) == without_seconds(measured)


def test_turned_on_in_the_folder_of_a_run(tmp_path: pathlib.Path) -> None:
    """Statistics may be turned on between two starts."""
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
    for found, expected in zip(two, one, strict=True):
        assert set(PARTS) <= set(found)
        del found["kind"], expected["kind"]
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_a_batch_that_changes(tmp_path: pathlib.Path) -> None:
    """The first updates have one microbatch, and so neither parts nor halves."""
    rule = ConfigDict({"name": "ramp", "points": ((0, 16), (64, 32))})
    train(config(batch_rule=rule, duration="2 steps"), tmp_path, quiet=True)
    records = read_records(tmp_path / "metrics.jsonl", "train")
    told = [(record["batch_size"], "noise_scale/trace" in record) for record in records]
    assert told and set(told) <= {(16, False), (32, True)} and told[-1] == (32, True)


def test_a_line_about_them() -> None:
    run = prepare(config(), None, jax.devices()[:1])
    assert describe(run.config, run.mesh) == (
        "statistics of gradients: noise scale from parts of 16 examples, similarity of two halves, "
        "variance of 16 examples every 3 updates"
    )
    assert describe(tiny.digits(), run.mesh) == ""


def on(**changes: Any) -> dict[str, Any]:
    return {f"statistics__{key}": value for key, value in changes.items()}


def grouped(size: int | None) -> ConfigDict:
    """A network with BatchNorm over groups of `size` examples; None: the whole batch."""
    return ConfigDict({**BATCH_NORM, "group_size": size})


@pytest.mark.parametrize(
    "devices, changes, message",
    [
        (1, on(per_example=-1), r"config\.statistics\.per_example is -1; it must be at least 0"),
        (1, on(interval=0), r"config\.statistics\.interval is 0; it must be at least 1"),
        (1, on(decay=1.0), r"config\.statistics\.decay is 1\.0; it must be at least 0 and below 1"),
        (1, on(noise_scale=1), r"config\.statistics\.noise_scale is 1; it must be True or False"),
        (1, on(halves=True, modules=("body",)), r"modules is \('body',\); it must be pairs"),
        (
            1,
            on(modules=(("body", ""),)),
            r"are compared by config\.statistics\.halves; it must be Tr",
        ),
        (
            1,
            on(halves=True, modules=(("body", "^hidden"),)) | {"accumulation_steps": 2},
            r"config\.statistics\.modules: no module matches the parameter 'output/bias'",
        ),
        (
            1,
            on(noise_scale=True),
            r"config\.statistics\.noise_scale is True, .* config\.accumulation_steps is 1; it must be at "
            "least 2, or",
        ),
        (8, on(noise_scale=True), r"config\.accumulation_steps is 1; it must be at least 2, or"),
        (
            1,
            on(noise_scale=True) | {"parallel__backend": "shard_map"},
            "is 1; it must be at least 2",
        ),
        (1, on(halves=True) | {"accumulation_steps": 1}, r"steps is 1; it must be an even number"),
        (
            3,
            on(halves=True) | {"batch_size": 63, "parallel__backend": "shard_map"},
            r"and config\.mesh splits the batch over 3; it must be an even number, or the backend 'jit'",
        ),
        (
            1,
            on(preconditioned=True)
            | {
                "accumulation_steps": 2,
                "optimizer": ConfigDict(
                    {"name": "lars", "learning_rate": 1.0, "rules": "no_bias_no_norm"}
                ),
            },
            r"config\.statistics\.preconditioned: the optimizer keeps no second moment of each",
        ),
        (
            1,
            on(per_example=65),
            "65; it must be at least 2, for a variance, and at most the 64 exam",
        ),
        (1, on(per_example=1), "is 1; it must be at least 2, for a variance"),
        (
            8,
            on(per_example=12),
            r"config\.statistics\.per_example is 12, which does not divide over",
        ),
        (
            1,
            on(per_example=8) | {"model": BATCH_NORM},
            r"per_example is 8, and the model's layer 'norm0' keeps statistics of the batch",
        ),
        (
            8,
            on(noise_scale=True) | {"model": grouped(16), "parallel__backend": "shard_map"},
            r"^config\.statistics\.noise_scale is True, which compares the devices .* by config\.model\."
            "group_size=16 the examples of 2 devices share a group .*; it must be at most the 8 of one",
        ),
        (
            2,
            on(halves=True) | {"model": grouped(None), "parallel__backend": "shard_map"},
            r"halves is True, which compares the devices .*group_size=None .* the 32 of one device$",
        ),
        (2, on(per_example=8) | {"mesh__model": 2}, r"and config\.mesh\.model is 2; leave it out"),
        (
            1,
            {
                "model": BATCH_NORM,
                "batch_rule": ConfigDict({"name": "norm_test", "upper": 128, "eta": 0.1}),
            },
            "^config.batch_rule.name is 'norm_test', which needs gradients of single examples, and the "
            "model's layer 'norm0' keeps statistics of the batch",
        ),
    ],
)
def test_mistakes(devices: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        prepare(tiny.digits(**changes), None, jax.devices()[:devices])
    assert "\n" not in str(error.value)


def test_what_has_no_parts(tmp_path: pathlib.Path) -> None:
    words = tiny.words(tiny.text(tmp_path), **on(noise_scale=True), accumulation_steps=2)
    with pytest.raises(UserError, match="'lstm_lm' carries a state for each row of a whole batch"):
        prepare(words, None, jax.devices()[:1])

    def load(*args: Any, **kwargs: Any) -> Any:
        from lamb_tpu import data

        source = data.load(*args, **kwargs)
        if kwargs["training"]:
            source.buckets = np.zeros(len(source), np.int64)
        return source

    with pytest.raises(UserError, match="is read in batches of like lengths, whose batches"):
        prepare(config(), None, jax.devices()[:1], load=load)


def test_pairs_that_are_mixed() -> None:
    task = ConfigDict({"name": "classification", "input_std": 16.0, "mixup_alpha": 0.2})
    with pytest.raises(UserError, match=r"config\.task\.mixup.* mixes pairs of examples, which"):
        prepare(tiny.digits(task=task, **on(per_example=8)), None, jax.devices()[:1])
