"""Records beside a table: damaged records are omitted with a warning, and nothing can be added."""

import json
import pathlib
import re

import pytest

from lamb_tpu.reproduce import jobs, loading, records, results
from lamb_tpu.reproduce.jobs import Job
from lamb_tpu.reproduce.results import Results
from lamb_tpu.reproduce.tables import Table
from lamb_tpu.store.metrics import MetricsWriter
from lamb_tpu.store.workdir import Workdir
from tests.raising import rejected
from tests.reproduce.papers import TABLE, record, write


def job_of(table: Table, cell: str = "lamb", seed: int = 0) -> Job:
    return Job(table, table.scales["small"], table.cells[cell], seed)


def add(actual: Results, job: Job, accuracy: float | None, **more: object) -> None:
    flat = jobs.flat_configs([stage.config() for stage in jobs.stages(job)])
    digest = jobs.config_hash(flat)
    fields = {"factor": job.factor, "config": digest, "scale": job.scale.name, **more}
    actual.add(record(job.cell.name, job.seed, accuracy, **fields), flat)


def test_two_processes_may_add(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    first, second = Results(table), Results(table)
    add(first, job_of(table), 0.9)
    add(second, job_of(table, seed=1), 0.8)
    assert [record["seed"] for record in Results(table)] == [0, 1]


def test_records_outlive_the_process(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    actual = Results(table)
    assert list(actual) == [] and not actual.holds(job_of(table))
    for seed in (1, 0):
        add(actual, job_of(table, seed=seed), 0.9)
    again = Results(table)
    assert [r["seed"] for r in again] == [0, 1]
    assert again.holds(job_of(table)) and not again.holds(job_of(table, seed=2))
    # Both seeds share one config, which is stored once.
    assert len(json.loads((tmp_path / "small" / "digits.configs.json").read_text())) == 1
    add(again, job_of(table), 0.8)
    assert [r["values"]["accuracy"] for r in Results(table)] == [0.8, 0.9]


def test_a_changed_config_makes_a_record_stale(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    add(Results(table), job_of(table), 0.9)
    table = write(tmp_path, TABLE.replace("4 steps", "5 steps"))
    actual = Results(table)
    assert actual.of(job_of(table)) is not None and not actual.holds(job_of(table))
    assert actual.changes(job_of(table)) == ["duration: '4 steps' there, '5 steps' now"]
    add(actual, job_of(table), 0.7)
    assert actual.holds(job_of(table)) and len(list(actual)) == 1
    # The unused config has been deleted.
    assert len(json.loads((tmp_path / "small" / "digits.configs.json").read_text())) == 1


def test_records_of_the_package_are_of_committed_code(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write(tmp_path)
    add(Results(table), job_of(table), 0.9, commit="0123456789ab+")  # a custom table
    monkeypatch.setattr(loading, "folder", lambda: tmp_path)
    shipped = Results(table)
    problem = "accepts only records of committed code, but the code has changed since commit 0123"
    with rejected("*digits.jsonl", ..., problem, "commit the changes"):
        add(shipped, job_of(table, seed=1), 0.9, commit="0123456789ab+")
    assert [actual["seed"] for actual in Results(table)] == [0]  # still readable
    for seed, commit in ((1, "0123456789ab"), (2, None)):  # an installed package has no commit
        add(shipped, job_of(table, seed=seed), 0.9, commit=commit)
    add(Results(table, tmp_path / "mine"), job_of(table), 0.9, commit="0123456789ab+")
    assert len(list(Results(table))) == 3


def test_machine() -> None:
    old = record("lamb", 0, 0.9)
    versions = "jax 0.10.2, commit 0123456789ab"
    assert results.machine(old) == f"1 x cpu, 2 cores, processor not recorded, {versions}"
    new = old | {"processor": "Fast", "commit": "0123456789ab+"}
    assert results.machine(new) == f"1 x cpu, 2 cores, Fast, {versions} with uncommitted changes"


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("digits.jsonl", "{\n", "line 1 of .*digits.jsonl is not JSON"),
        ("digits.jsonl", '{"cell": "lamb"}\n', "line 1 of .*digits.jsonl: scale is missing"),
        ("digits.configs.json", "[", "digits.configs.json cannot be read"),
        (
            "digits.configs.json",
            "{}",
            "config='.*' is not the hash of valid configs in digits.configs.json",
        ),
    ],
)
def test_damage_is_left_out_and_never_deleted(
    tmp_path: pathlib.Path, name: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write(tmp_path)
    add(Results(table), job_of(table), 0.9)
    (tmp_path / "small" / name).write_text(text)
    actual = Results(table)
    assert list(actual) == []
    actual.warn()
    warning = " ".join(capsys.readouterr().err.split())
    assert warning.startswith("warning: ") and "; this entry is omitted" in warning
    for write_records in (actual.check, lambda: add(actual, job_of(table, seed=1), 0.9)):
        remedy = "restore digits.jsonl and digits.configs.json"
        with rejected(table.records, ..., "is damaged: ", remedy) as caught:
            write_records()
        assert re.search(message, caught.value.problem)
    assert (tmp_path / "small" / name).read_text() == text


def test_a_record_needs_the_metric_of_its_scale(tmp_path: pathlib.Path) -> None:
    table = write(tmp_path)
    add(Results(table), job_of(table), 0.9)
    table = write(tmp_path, TABLE.replace('key = "accuracy"', 'key = "mlm_accuracy"'))
    (damage,) = Results(table).damage
    assert damage.endswith(": values has no mlm_accuracy, the metric of the scale small")


def test_a_metric_that_is_not_finite_is_a_run_that_diverged(tmp_path: pathlib.Path) -> None:
    job = job_of(write(tmp_path))
    (stage,) = jobs.stages(job)
    folder = Workdir(tmp_path / "run")
    folder.check(stage.config())
    folder.write_config(stage.config())
    receipt = dict.fromkeys(("device", "jax", "commit", "python"), "") | {"devices": 1, "cores": 2}
    receipts = [receipt | {"commit": "a+"}, receipt | {"commit": "b", "processor": "Fast"}]
    (folder.path / "run.jsonl").write_text("".join(json.dumps(each) + "\n" for each in receipts))
    with MetricsWriter(folder.path, 0, tensorboard=False) as writer:
        writer.write(
            4, "train", {"loss": 2.0, "epoch": 0.3, "seconds": 0.5, "learning_rate": float("nan")}
        )
        writer.write(4, "eval", {"accuracy": float("nan"), "loss": 2.0, "epoch": 0.3})
    actual = results.of_run(job, folder.path)
    assert actual["values"] is None and actual["diverged"] == "the last accuracy is nan"
    # The code had uncommitted changes when the run started.
    assert (actual["commit"], actual["processor"]) == ("a+", "Fast")
    assert actual["evaluations"] == [[0.3, None]] and actual["losses"] == [[4, 2.0]]
    assert (actual["updates"], actual["examples"]) == (4, 4 * 128)
    with MetricsWriter(folder.path, 4, tensorboard=False) as writer:  # the batch size changes
        writer.write(
            8, "train", {"seconds": 0.9, "epoch": 0.6, "learning_rate": 0.1, "examples": 900}
        )
    actual = results.of_run(job, folder.path)
    assert (actual["updates"], actual["examples"]) == (8, 900) and actual["sent_bytes"] is None
    assert actual["learning_rate"] == 0.1
    records.check(actual | {"config": "0" * 12}, "the record")
    with MetricsWriter(folder.path, 8, tensorboard=False) as writer:
        writer.write(8, "eval", {"accuracy": 1e300, "epoch": 0.6})
    assert results.of_run(job, folder.path)["diverged"] == "the last accuracy is 1e+300"
    (folder.path / "run.jsonl").write_text('{"device": "cpu", "devices": 1, "cores": 2}\n')
    with rejected(f"line 1 of {folder.path / 'run.jsonl'}", ..., "has no jax", "restore the file"):
        results.of_run(job, folder.path)


def test_bytes_are_a_mean_over_updates() -> None:
    records = [{"step": 3}, {"step": 4, "sent_bytes": 100}, {"step": 7, "sent_bytes": 20}]
    assert results._sent_bytes(records) == 40


def test_curves_are_thinned_and_keep_their_end() -> None:
    actual = results._thinned([{"step": n} for n in range(1, 1001)], 60)
    assert 50 <= len(actual) <= 60 and actual[-1]["step"] == 1000
    assert results._thinned([], 60) == []
    assert [r["step"] for r in results._thinned([{"step": 1}, {"step": 2}], 60)] == [1, 2]
