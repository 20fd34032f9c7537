"""The batch-scaling study of `make demo`, reduced, and the choice of its base rates."""

import json
import os
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest

from experiments.demo import batch_scaling, page, plot, tune, tuned
from experiments.demo.plot import draw
from experiments.demo.study import cell, run_trials
from lamb_tpu import style
from lamb_tpu.data.digits import load_digits
from lamb_tpu.errors import UserError
from lamb_tpu.run.recipe import resolve
from tests.shared import ROOT

BATCH_SIZES = (360, 720)
ALL_LINES = batch_scaling.LINES
LINES = (ALL_LINES[0], ALL_LINES[-1])
KEYS = {
    "name", "optimizer", "scaling", "batch_size", "seed", "learning_rate", "warmup_epochs",
    "updates", "accuracy", "loss", "seconds", "curve", "device", "devices", "cores", "jax",
    "commit",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def fewer_lines():
    """Two lines of the study's four: each run compiles for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_scaling, "LINES", LINES)
        yield


@pytest.fixture(scope="module")
def study(fewer_lines, tmp_path_factory):
    """A study of two batch sizes and one seed: its folder and records."""
    out = tmp_path_factory.mktemp("study")
    return out, batch_scaling.run_study(out, BATCH_SIZES, seeds=1, epochs=1.0)


def _files(out):
    return {path: path.read_bytes() for path in sorted(out.glob("runs/*/metrics.jsonl"))}


@pytest.mark.long
def test_records(study):
    out, records = study
    assert [json.loads(line) for line in (out / "records.jsonl").open()] == records
    assert all(set(record) == KEYS for record in records)
    found = [(r["optimizer"], r["scaling"], r["batch_size"]) for r in records]
    assert found == [(*line[:2], size) for line in LINES for size in BATCH_SIZES]
    assert len(_files(out)) == len(records)
    for record in records:
        assert record["updates"] == -(-1437 // record["batch_size"])
        # A share of the 360 test scans, each counted once.
        hits = record["accuracy"] * 360
        assert hits == pytest.approx(round(hits), abs=1e-6)
        assert record["seconds"] > 0


def test_rates_and_warmups_follow_the_rules(monkeypatch):
    monkeypatch.setattr(batch_scaling, "LINES", ALL_LINES)
    trials = batch_scaling.make_trials((32, 128), seeds=1, epochs=30.0)
    for small, large in zip(trials[::2], trials[1::2], strict=True):
        before, after = (resolve(trial.config, 1437) for trial in (small, large))
        rate = after.peak_learning_rate / before.peak_learning_rate
        warmup_epochs = 4 * after.warmup_steps / before.warmup_steps
        scaling = large.config.schedule.scaling
        expected = {"identity": (1, 1), "linear": (4, 1), "legw": (2, 4)}[scaling]
        assert (rate, warmup_epochs) == pytest.approx(expected), large.name


def test_second_study_repeats_nothing_and_shows_the_same(study, capsys):
    out, records = study
    before = _files(out)
    (out / batch_scaling.PLOT).unlink()
    (out / "records.jsonl").unlink()
    assert batch_scaling.run_study(out, BATCH_SIZES, seeds=1, epochs=1.0) == records
    assert _files(out) == before
    assert [json.loads(line) for line in (out / "records.jsonl").open()] == records

    printed = capsys.readouterr().out
    for record in records:
        assert f"{record['name']}: accuracy {100 * record['accuracy']:.2f} %" in printed
    assert "Momentum fails by the rule" in printed and "each rate tuned at each batch" in printed
    assert max(map(len, printed[printed.index("Test accuracy") :].splitlines()[:-4])) <= 80
    table = printed[printed.index("optimizer, scaling") :]
    for optimizer, scaling, label in LINES:
        row = next(line for line in table.splitlines() if label in line)
        cells = [cell.strip() for cell in row.split("│")[2:4]]
        line = [r for r in records if r["name"].startswith(f"{optimizer}-{scaling}-")]
        assert cells == [f"{100 * record['accuracy']:.1f}" for record in line]
    assert str(out / batch_scaling.PLOT) in printed and str(out / "records.jsonl") in printed


def test_plot_is_a_picture(study):
    out, _ = study
    pixels = matplotlib.image.imread(out / batch_scaling.PLOT)
    height, width = pixels.shape[:2]
    assert height > 400 and width > 1000
    # Something is drawn in both halves, in the colour of each line.
    for half in (pixels[:, : width // 2, :3], pixels[:, width // 2 :, :3]):
        for optimizer in ("momentum", "lamb"):
            color = style.OPTIMIZERS[optimizer].color[1:]
            rgb = np.frombuffer(bytes.fromhex(color), np.uint8) / 255
            assert (np.abs(half - rgb).max(axis=-1) < 0.01).sum() > 10, color


def test_folder_with_another_config_is_refused_before_anything_is_trained(study):
    out, _ = study
    before = _files(out)
    # A new batch size comes first: it must not be trained either.
    with pytest.raises(UserError, match=r"--out=.*duration: '1.0 epochs' there, '2.0 epochs' now"):
        batch_scaling.run_study(out, (32, *BATCH_SIZES), seeds=1, epochs=2.0)
    assert _files(out) == before


def test_a_diverged_run_is_told_and_the_study_goes_on(study, tmp_path, capsys):
    trial = batch_scaling.make_trials((1440,), seeds=1, epochs=2.0)[0]
    trial.config.optimizer.learning_rate = 1e30
    trial.config.schedule.warmup = "0 steps"
    (diverged,) = run_trials([trial], tmp_path, str)
    assert diverged["accuracy"] is None and diverged["loss"] is None
    assert f"{trial.name}: diverged" in capsys.readouterr().out
    finished = {**study[1][0], "batch_size": 1440}
    assert cell([diverged, finished]) == "1 of 2 diverged"
    draw({"momentum": [diverged]}, tmp_path / "plot.png", "digits")
    assert matplotlib.image.imread(tmp_path / "plot.png").size > 0


def test_means_ascend_whatever_the_order_of_the_records():
    """Else the line of a plot goes back and forth."""
    records = [
        {"batch_size": size, "accuracy": accuracy}
        for size, accuracy in ((128, 0.9), (32, 0.8), (512, None), (1437, 0.7), (128, 0.8))
    ]
    means = plot._means(records)
    assert list(means) == [32, 128, 1437] and means[128] == pytest.approx(85.0)



def test_last_column_is_the_true_full_batch(monkeypatch):
    monkeypatch.setattr(batch_scaling, "LINES", ALL_LINES)
    *_, full = batch_scaling.default_batch_sizes()
    assert full == len(load_digits("train")) == 1437
    for trial in batch_scaling.make_trials((full,), seeds=1, epochs=30.0):
        assert resolve(trial.config, full).total_steps == 30


def test_cells():
    line = [{"batch_size": 32, "accuracy": accuracy} for accuracy in (0.90, 0.92, 0.94)]
    assert cell(batch_scaling.at(line, 32)) == "92.0 ± 2.0"
    assert cell(line[:1]) == "90.0"
    assert cell(batch_scaling.at(line, 128)) == ""


def test_tuning_never_sees_the_test_set_nor_a_larger_batch():
    trials = tune.make_trials(seeds=2)
    assert {trial.config.batch_size for trial in trials} == {32}
    assert {(t.config.data.train_split, t.config.data.eval_split) for t in trials} == {
        ("train[:80%]", "train[80%:]")
    }
    counts = [sum(t.config.optimizer.name == name for t in trials) for name in tune.FIRST_RATES]
    assert counts == [2 * tune.NUM_RATES] * 3


def test_tuning_chooses_the_best_mean_accuracy_then_the_lowest_loss():
    records = [
        {"optimizer": "lamb", "learning_rate": rate, "accuracy": accuracy, "loss": loss}
        for rate, accuracy, loss in [
            (0.1, 0.99, 0.1), (0.1, 0.93, 0.1), (0.2, 0.97, 0.3), (0.2, 0.97, 0.3),
            (0.4, 0.97, 0.2), (0.4, 0.97, 0.2), (0.8, 1.0, 0.1), (0.8, None, None),
        ]
    ]  # fmt: skip
    means = tune.mean_results(records)["lamb"]
    assert list(means) == [0.1, 0.2, 0.4]  # not the rate at which a run diverged
    assert means[0.1] == pytest.approx((0.96, 0.1))
    assert tune.choose(means) == 0.4


def test_config_has_the_rates_that_tuning_can_have_chosen(monkeypatch):
    monkeypatch.setattr(batch_scaling, "LINES", ALL_LINES)
    for trial in batch_scaling.make_trials((32,), seeds=1, epochs=1.0):
        optimizer = trial.config.optimizer
        first = tune.FIRST_RATES[optimizer.name]
        grid = [first * 2**power for power in range(tune.NUM_RATES)]
        # Inside the grid: a best rate at its edge would say that the grid is too narrow.
        assert optimizer.learning_rate in grid[1:-1]


def test_mistakes_on_the_command_line_are_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    program = [sys.executable, "-m", "experiments.demo.batch_scaling"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "NPROC"))}
    result = subprocess.run(
        [*program, f"--out={tmp_path}/file"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert f"--out={tmp_path}/file cannot be written" in result.stderr


def test_a_grid_goes_on_until_its_best_lies_inside():
    means = {0.1: (0.9, 1.0), 0.2: (0.95, 1.0), 0.4: (0.9, 1.0)}
    assert tuned.next_rate(means, [0.1, 0.2, 0.4]) is None
    assert tuned.next_rate({**means, 0.8: (0.97, 1.0)}, [0.1, 0.2, 0.4, 0.8]) == 1.6
    assert tuned.next_rate({**means, 0.05: (0.97, 1.0)}, [0.05, 0.1, 0.2, 0.4]) == 0.025
    # Of 0.4 and 0.8 some runs diverged: 0.2 has worse ones on both sides.
    assert tuned.next_rate({0.1: (0.9, 1.0), 0.2: (0.95, 1.0)}, [0.1, 0.2, 0.4, 0.8]) is None
    assert tuned.next_rate({}, [0.1, 0.2]) == 0.05


def test_study_of_tuned_rates(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "first_grid", lambda optimizer, batch: [0.001, 0.002])
    accuracies = {0.001: 0.3, 0.002: 0.5, 0.004: 0.7, 0.008: 0.6}
    seen = []

    def run_trials(trials, out, show):
        seen.extend(trials)
        return [
            {"optimizer": "lamb", "learning_rate": t.config.optimizer.learning_rate, "loss": 1.0,
             "seed": t.config.seed, "accuracy": accuracies[t.config.optimizer.learning_rate]}
            for t in trials
        ]

    monkeypatch.setattr(tuned, "run_trials", run_trials)
    study = tuned.Study(tmp_path, 2)
    assert study.choose("lamb", 1437) == 0.004
    study.measure("lamb", 1437, 0.004)
    *chosen, first, second = seen
    assert [t.config.optimizer.learning_rate for t in chosen[::2]] == [0.001, 0.002, 0.004, 0.008]
    for trial in chosen:
        assert trial.config.data.eval_split == tune.HELD_OUT  # never a test scan
        assert trial.config.batch_size == 1150  # all that are trained on
    for trial in (first, second):
        assert (trial.config.data.train_split, trial.config.data.eval_split) == ("train", "test")
        assert trial.config.batch_size == 1437
    assert len({trial.name for trial in seen}) == len(seen)
    assert [record["part"] for record in study.records] == ["tune"] * 8 + ["test"] * 2


@pytest.mark.parametrize("optimizer", tuned.OPTIMIZERS)
@pytest.mark.parametrize("batch", tuned.BATCHES)
def test_kept_rate_is_the_best_of_its_grid_and_not_at_its_edge(optimizer, batch):
    grid = [
        record for record in tuned.kept()
        if (record["part"], record["optimizer"], record["batch"]) == ("tune", optimizer, batch)
    ]
    rates = sorted({record["learning_rate"] for record in grid})
    assert len(grid) == 3 * len(rates) and {record["seed"] for record in grid} == {0, 1, 2}
    best = tune.choose(tune.mean_results(grid)[optimizer])
    assert rates[0] < best < rates[-1]
    found = tuned.chosen(tuned.kept(), optimizer, batch)
    assert [record["seed"] for record in found] == [0, 1, 2]
    assert {record["learning_rate"] for record in found} == {best}


def test_page_is_that_of_its_records(monkeypatch):
    monkeypatch.setattr(batch_scaling, "LINES", ALL_LINES)
    assert page.PAGE.read_text() == page.page()


def test_readme_has_the_page_s_numbers(monkeypatch):
    monkeypatch.setattr(batch_scaling, "LINES", ALL_LINES)
    records = [r for r in page.read_records(batch_scaling.KEPT) if r["rate_factor"] == 1]
    tables = [
        [cell(batch_scaling.at(line, size)) for size in tuned.BATCHES]
        for line in batch_scaling.rows(records).values()
    ]
    tables += [
        [cell(tuned.chosen(tuned.kept(), optimizer, batch)) for batch in tuned.BATCHES]
        for optimizer in tuned.OPTIMIZERS
    ]
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if "|" in line]
    for cells in tables:
        means = " | ".join(text.partition(" ")[0] for text in cells)
        assert any(row.endswith(f"| {means} |") for row in rows), means
