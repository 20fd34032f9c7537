"""The records of a run: means of metrics, JSON lines, and the metrics.jsonl of a killed run."""

import json
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.store.metrics import MetricsWriter, fetched, mean_metrics, read_receipts, read_records
from tests.raising import rejected


def test_sums_and_weights_are_divided_once() -> None:
    batches = [
        {"loss": (jnp.float32(6.0), jnp.float32(3.0))},
        {"loss": (jnp.float32(4.0), jnp.float32(1.0))},
    ]
    assert mean_metrics(batches) == {"loss": 2.5}  # not (2 + 4) / 2


def test_metric_without_weight_is_left_out() -> None:
    left_out = {"loss": (jnp.float32(0), jnp.float32(0)), "skipped": (jnp.float32(1), 1.0)}
    update = {"loss": (jnp.float32(6), jnp.float32(3)), "skipped": (jnp.float32(0), 1.0)}
    assert mean_metrics([left_out, update]) == {"loss": 2.0, "skipped": 0.5}
    assert mean_metrics([left_out]) == {"skipped": 1.0}
    assert mean_metrics([]) == {}


def test_perplexity_is_of_all_words() -> None:
    batches = [
        {"perplexity": (np.log(4.0), 1.0), "far_perplexity": (1e6, 1.0)},
        {"perplexity": (2 * np.log(2.0), 2.0), "far_perplexity": (1e6, 1.0)},
    ]
    # The geometric mean of 4, 2 and 2, not a mean of perplexities.
    assert mean_metrics(batches) == {
        "perplexity": pytest.approx(16 ** (1 / 3)),
        "far_perplexity": np.inf,
    }


def test_totals_are_in_float64() -> None:
    batches = [{"n": (jnp.float32(2**24), jnp.float32(1))}, {"n": (jnp.float32(1), jnp.float32(0))}]
    assert mean_metrics(batches) == {"n": 2**24 + 1}


def test_the_host_fetches_one_tree_later() -> None:
    made = []

    def trees() -> Iterator[dict[str, jax.Array]]:
        for number in range(3):
            made.append(number)
            yield {"x": jnp.full(2, number)}

    actual = [(tree["x"], len(made)) for tree in fetched(trees())]
    assert [(type(x), x.tolist(), n) for x, n in actual] == [
        (np.ndarray, [0, 0], 2),
        (np.ndarray, [1, 1], 3),
        (np.ndarray, [2, 2], 3),
    ]


def test_records_come_back(tmp_path: pathlib.Path) -> None:
    with MetricsWriter(tmp_path, 0, tensorboard=False) as writer:
        writer.write(1, "train", {"loss": 0.1 + 0.2})
        writer.write(1, "eval", {"accuracy": 0.5})
        # Records are on disk at once, for readers during the run and in case it is killed.
        assert len(read_records(tmp_path / "metrics.jsonl")) == 2
    assert read_records(tmp_path / "metrics.jsonl", "train") == [
        {"step": 1, "kind": "train", "loss": 0.1 + 0.2}
    ]


def test_values_that_json_does_not_have(tmp_path: pathlib.Path) -> None:
    with MetricsWriter(tmp_path, 0, tensorboard=False) as writer:
        writer.write(1, "eval", {"loss": float("nan"), "worst": float("-inf")})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()

    def reject(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    assert json.loads(line, parse_constant=reject)["loss"] == "nan"
    assert read_records(tmp_path / "metrics.jsonl")[0]["worst"] == "-inf"


def test_incomplete_last_line_is_skipped(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = '{"step": 4, "kind": "train"}\n'
    path.write_text(first + '{"step": 5, "ki')
    assert read_records(path) == [{"step": 4, "kind": "train"}]
    with MetricsWriter(tmp_path, 4, tensorboard=False) as writer:
        writer.write(5, "train", {})
    assert [record["step"] for record in read_records(path)] == [4, 5]


def test_records_after_the_checkpoint_are_removed(tmp_path: pathlib.Path) -> None:
    for start, steps in ((0, range(1, 8)), (4, (5, 6))):
        with MetricsWriter(tmp_path, start, tensorboard=False) as writer:
            for step in steps:
                writer.write(step, "train", {"from": start})
    records = read_records(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["from"]) for r in records] == [(s, 0) for s in (1, 2, 3, 4)] + [
        (5, 4),
        (6, 4),
    ]


def test_evaluation_still_to_come_is_removed_too(tmp_path: pathlib.Path) -> None:
    for evaluated in (True, False):
        with MetricsWriter(tmp_path, 0, tensorboard=False) as writer:
            for step in (1, 2, 3):
                for kind in ("spike", "train", "layers", "eval"):
                    writer.write(step, kind, {})
        with MetricsWriter(tmp_path, 2, tensorboard=False, evaluated=evaluated):
            pass
        records = [(r["step"], r["kind"]) for r in read_records(tmp_path / "metrics.jsonl")]
        assert records[-1] == (2, "eval" if evaluated else "layers")
        assert len(records) == 7 + evaluated and (1, "eval") in records


def test_missing_records_are_counted(tmp_path: pathlib.Path) -> None:
    with MetricsWriter(tmp_path, 0, tensorboard=False) as writer:
        for step in (1, 2, 3):
            writer.write(step, "train", {})
        writer.write(2, "eval", {})
        assert writer.counts == {"train": 3, "eval": 1} and not writer.missing
    expected = {"train": 2, "eval": 1, "target": 1}
    with MetricsWriter(tmp_path, 2, tensorboard=False, expected=expected) as writer:
        assert writer.counts["train"] == 2 and writer.steps == {2}
        assert writer.missing == {"target": 1}
    (tmp_path / "metrics.jsonl").unlink()
    with MetricsWriter(tmp_path, 2, tensorboard=False, expected=expected) as writer:
        assert writer.missing == expected


def test_damaged_line_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "kind": "train"}\n\xff\xfe{\n')
    with rejected(f"line 2 of {path}", problem="is not JSON", remedy="restore the file"):
        read_records(path)
    with rejected("*none.jsonl", problem="does not exist", remedy="give the workdir of a run"):
        read_records(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("train", {"step": "a"}, "step='a' is not valid; use the type int"),
        ("train", {"step": 10**30}, "step=10* is not valid; use at most"),
        ("train", {"kind": None}, "kind=None is not valid; use the type str"),
        ("train", {"seconds": "long"}, "seconds='long' is not valid; use the type float"),
        ("train", {"seconds": float("inf")}, "seconds=inf is not valid; use at most"),
        ("train", {"epoch": []}, "epoch=.. is not valid; use the type float"),
        ("train", {"loss": "high"}, "loss='high' is unknown; use "),
        ("train", {"learning_rate": float("nan")}, "learning_rate=nan is not valid; use at least"),
        ("train", {"accuracy": float("nan")}, "accuracy=nan is not valid; use at least"),
        ("train", {"accuracy": {}}, "accuracy={} is not valid; use the type"),
        ("train", {"examples": -1}, "examples=-1 is not valid; use at least 0"),
        ("eval", {"epoch": None}, "epoch=None is not valid; use the type float"),
    ],
)
def test_every_value_of_a_record_is_checked(
    tmp_path: pathlib.Path, kind: str, changes: dict[str, object], message: str
) -> None:
    path, first = tmp_path / "metrics.jsonl", {"step": 1, "kind": kind}
    if kind == "train":
        first |= {"epoch": 1.0, "seconds": 1.0}
    path.write_text("".join(json.dumps(each) + "\n" for each in (first, first | changes)))
    with pytest.raises(UserError, match=f"line [12] of {path}: {message}"):
        read_records(path, kind)
    path.write_text(json.dumps(first) + "\n")
    with rejected(f"line 1 of {path}: rate", problem="is missing", remedy="restore the file"):
        read_records(path, kind, ["rate"])


@pytest.mark.parametrize(
    "line, message",
    [
        ("{}", "device is missing"),
        ("[]", "is not a JSON object"),
        ('{"device": 5, "devices": 1}', "device=5 is not valid; use the type str"),
        ('{"device": "cpu", "devices": "1"}', "devices='1' is not valid; use the type int"),
        ('{"device": "cpu", "devices": 1, "commit": 5}', "commit=5 is not valid; use the type str"),
    ],
)
def test_receipts_are_checked(tmp_path: pathlib.Path, line: str, message: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=f"line 1 of {path}.*{message}"):
        read_receipts(path)


def test_other_processes_write_nothing(tmp_path: pathlib.Path) -> None:
    with MetricsWriter(tmp_path, 0, tensorboard=True, enabled=False) as writer:
        writer.write(1, "train", {"loss": 1.0})
    assert not list(tmp_path.iterdir())
