"""The MNIST table: which runs count, and what the page says of them."""

import json
import math
import pathlib

from configs import mnist_lenet
from experiments.lamb import mnist
from experiments.records import Records
from lamb_tpu.config import flatten
from lamb_tpu.store.metrics import read_records


def write_run(
    folder: pathlib.Path, accuracy: float, seed: int = 0, epochs: float = 30.0, batch: int = 1024
) -> None:
    folder.mkdir(parents=True)
    config = mnist_lenet.get_config(f"network=lenet5,batch={batch}")
    config.seed = seed
    (folder / "config.json").write_text(json.dumps(flatten(config)))
    step = math.ceil(epochs * 60_000 / batch)
    evaluation = {"step": step, "kind": "eval", "accuracy": accuracy, "loss": 0.1, "epoch": epochs}
    training = {"step": step, "kind": "train", "loss": 0.1, "seconds": 120.04}
    lines = (json.dumps(record) + "\n" for record in (training, evaluation))
    (folder / "metrics.jsonl").write_text("".join(lines))
    receipt = {"device": "cpu", "devices": 1, "cores": 2, "jax": "0.10.2", "commit": "abc"}
    (folder / "run.jsonl").write_text(json.dumps(receipt) + "\n")


def test_only_complete_runs_count(tmp_path):
    write_run(tmp_path / "complete", 0.99)
    write_run(tmp_path / "half", 0.98, seed=1, epochs=15.0)
    write_run(tmp_path / "other batch", 0.97, seed=2, batch=4096)
    write_run(tmp_path / "young", 0.96, seed=3)
    (tmp_path / "young" / "metrics.jsonl").write_text("")
    (record,) = mnist.collect(tmp_path)
    assert (record["seed"], record["test_accuracy"], record["seconds"]) == (0, 0.99, 120.0)


def test_a_repeated_run_replaces_its_record(tmp_path):
    write_run(tmp_path / "old", 0.98)
    write_run(tmp_path / "other", 0.97, seed=1)
    records = Records(tmp_path / "mnist.jsonl", mnist.Cell._fields)
    records.add(mnist.collect(tmp_path))
    write_run(tmp_path / "new" / "run", 0.99)
    records.add(mnist.collect(tmp_path / "new"))
    assert [record["test_accuracy"] for record in records] == [0.99, 0.97]


def test_table_has_mean_spread_and_cells_not_run(tmp_path):
    write_run(tmp_path / "a", 0.98)
    write_run(tmp_path / "b", 0.99, seed=1)
    page = mnist.table(mnist.collect(tmp_path))
    measured = "0.9850 | 0.9800 to 0.9900 | 0: 0.9800, 1: 0.9900 | 2.0 | 1 x cpu, 2 cores |"
    assert f"| lamb | 0.004 | - | {measured}" in page
    assert "| lamb | 0.004 | 0.9945 | not run | - | - | - | - |" in page
    assert "collapsed" not in page


def test_table_says_which_run_collapsed(tmp_path):
    write_run(tmp_path / "a", 0.1135, seed=7)
    assert "lenet5 with lamb, seed 7: training collapsed" in mnist.table(mnist.collect(tmp_path))


def test_the_page_is_made_from_the_records():
    records = read_records(mnist.FOLDER / "mnist.jsonl")
    assert (mnist.FOLDER / "mnist.md").read_text() == mnist.table(records)
