"""The record of a run: sums to means, lines of JSON, what a killed run leaves."""

import json
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lamb_tpu.errors import UserError
from lamb_tpu.store.metrics import MetricsWriter, fetched, mean_metrics, read_records


def test_sums_and_weights_are_divided_once() -> None:
    batches = [
        {"loss": (jnp.float32(6.0), jnp.float32(3.0))},
        {"loss": (jnp.float32(4.0), jnp.float32(1.0))},
    ]
    assert mean_metrics(batches) == {"loss": 2.5}  # and not (2 + 4) / 2


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
    # The geometric mean of 4, 2 and 2, and no mean of perplexities.
    assert mean_metrics(batches) == {
        "perplexity": pytest.approx(16 ** (1 / 3)),
        "far_perplexity": np.inf,
    }


def test_totals_are_in_float64() -> None:
    batches = [{"n": (jnp.float32(2**24), jnp.float32(1))}, {"n": (jnp.float32(1), jnp.float32(0))}]
    assert mean_metrics(batches) == {"n": 2**24 + 1}


def test_the_host_fetches_one_behind_the_devices() -> None:
    made = []

    def trees() -> Iterator[dict[str, jax.Array]]:
        for number in range(3):
            made.append(number)
            yield {"x": jnp.full(2, number)}

    found = [(tree["x"], len(made)) for tree in fetched(trees())]
    assert [(type(x), x.tolist(), n) for x, n in found] == [
        (np.ndarray, [0, 0], 2),
        (np.ndarray, [1, 1], 3),
        (np.ndarray, [2, 2], 3),
    ]


def test_records_come_back(tmp_path: pathlib.Path) -> None:
    with MetricsWriter(tmp_path, 0, tensorboard=False) as writer:
        writer.write(1, "train", {"loss": 0.1 + 0.2})
        writer.write(1, "eval", {"accuracy": 0.5})
        # On disk already, for a reader beside the run and for one that is killed.
        assert len(read_records(tmp_path / "metrics.jsonl")) == 2
    assert read_records(tmp_path / "metrics.jsonl", "train") == [
        {"step": 1, "kind": "train", "loss": 0.1 + 0.2}
    ]


def test_values_that_json_does_not_have(tmp_path: pathlib.Path) -> None:
    with MetricsWriter(tmp_path, 0, tensorboard=False) as writer:
        writer.write(1, "eval", {"loss": float("nan"), "worst": float("-inf")})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    assert json.loads(line, parse_constant=refuse)["loss"] == "nan"
    assert read_records(tmp_path / "metrics.jsonl")[0]["worst"] == "-inf"


def test_last_line_without_its_end_is_passed_over(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 4, "kind": "train"}\n'
    path.write_text(whole + '{"step": 5, "ki')
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


def test_damaged_line_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "kind": "train"}\n\xff\xfe{\n')
    with pytest.raises(UserError, match=f"line 2 of {path} is not JSON"):
        read_records(path)
    with pytest.raises(UserError, match="there is no .*; is its folder the workdir of a run"):
        read_records(tmp_path / "none.jsonl")


def test_other_processes_write_nothing(tmp_path: pathlib.Path) -> None:
    with MetricsWriter(tmp_path, 0, tensorboard=True, enabled=False) as writer:
        writer.write(1, "train", {"loss": 1.0})
    assert not list(tmp_path.iterdir())
