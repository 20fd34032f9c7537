"""Pre-training: the loss's terms and weights, and errors if the heads do not fit the data."""

from typing import Any

import jax
import numpy as np
import pytest

from lamb_tpu import data, models
from lamb_tpu.models.bert import HEADS
from lamb_tpu.tasks import build
from tests.raising import rejected
from tests.tasks.berts import TINY, examples

ROWS, WORDS = 6, 7
RNG = np.random.default_rng(1)
# The logits are fields of the batch, which the model returns.
BATCH = {
    **{key: value for key, value in examples(ROWS).items() if key.startswith(("masked", "next"))},
    "input_ids": np.zeros((ROWS, 1), np.int32),
    "mlm_logits": RNG.normal(0, 2, (ROWS, 4, WORDS)).astype(np.float32),
    "nsp_logits": RNG.normal(0, 2, (ROWS, 2)).astype(np.float32),
}
BATCH["masked_weights"] = (np.arange(4) < np.array([4, 1, 0, 2, 1, 3])[:, None]).astype(np.float32)
BATCH["masked_ids"] = RNG.integers(0, WORDS, (ROWS, 4), np.int32)
TASK = build("masked_lm", models.Model(lambda key, x: {"params": {}}, lambda v, x, **_: (x, {})))


def by_hand(rows: list[int]) -> dict[str, tuple[float, float]]:
    def scored(actual: list[tuple[np.ndarray, int]]) -> tuple[float, float]:
        losses = [np.log(np.exp(x.astype(float)).sum()) - x[label] for x, label in actual]
        return sum(losses), sum(int(x.argmax()) == label for x, label in actual)

    words = [
        (BATCH["mlm_logits"][row, place], BATCH["masked_ids"][row, place])
        for row in rows
        for place in range(4)
        if BATCH["masked_weights"][row, place]
    ]
    pairs = [(BATCH["nsp_logits"][row], BATCH["next_sentence_label"][row]) for row in rows]
    sums = {}
    for name, actual in (("mlm", words), ("nsp", pairs)):
        loss, right = scored(actual)
        sums[f"{name}_loss"], sums[f"{name}_accuracy"] = (loss, len(actual)), (right, len(actual))
    return sums


def assert_sums(actual: Any, expected: dict[str, tuple[float, float]]) -> None:
    assert actual.keys() == expected.keys()
    for name, pair in expected.items():
        np.testing.assert_allclose(actual[name], pair, rtol=1e-5, err_msg=name)


def test_terms_are_sums_with_matching_weights() -> None:
    terms, (state, sums) = TASK.loss({}, {}, BATCH, jax.random.key(0))
    expected = by_hand(list(range(ROWS)))
    assert_sums(sums, expected)
    weights = TASK.weights(BATCH)
    assert weights.keys() == terms.keys() == {"mlm", "nsp"}
    assert (weights["mlm"], weights["nsp"]) == (11, ROWS)
    for term, total in terms.items():
        np.testing.assert_allclose(total, expected[f"{term}_loss"][0], rtol=1e-5)


def test_without_pairs() -> None:
    batch = {key: value for key, value in BATCH.items() if not key.startswith(("next", "nsp"))}
    terms, (_, sums) = TASK.loss({}, {}, batch, jax.random.key(0))
    assert terms.keys() == TASK.weights(batch).keys() == {"mlm"}
    assert sums.keys() == {"mlm_loss", "mlm_accuracy"}


def test_mask_selects() -> None:
    """A padded example also has masked words, and may give NaN."""
    batch = {name: value.copy() for name, value in BATCH.items()}
    for name in ("mlm_logits", "nsp_logits"):
        batch[name][[3, 5]] = np.nan
    mask = np.array([1, 1, 1, 0, 1, 0], np.float32)
    assert_sums(TASK.evaluate({}, {}, batch | {"mask": mask}), by_hand([0, 1, 2, 4]))


def test_unused_entries_may_hold_anything() -> None:
    batch = BATCH | {
        "mlm_logits": np.where(BATCH["masked_weights"][..., None] > 0, BATCH["mlm_logits"], np.inf)
    }
    assert_sums(TASK.loss({}, {}, batch, jax.random.key(0))[1][1], by_hand(list(range(ROWS))))


def made(*without: str) -> data.ArraySource:
    arrays = {key: value for key, value in examples(4).items() if key not in without}
    return data.ArraySource("made", arrays, None)


@pytest.mark.parametrize(
    "heads, without, message",
    [
        (("nsp",), "", ("has no 'mlm'", "set config.model.heads=('mlm', 'nsp')")),
        (("span",), "next_sentence_label", ("has no 'mlm'", "set config.model.heads=('mlm',)")),
        (("mlm",), "", ("has no 'nsp', but made has sentence pairs", "next_sentence=False")),
        (HEADS, "next_sentence_label", ("but made has no sentence pairs", "next_sentence=True")),
        (HEADS, "masked_ids", ("has the fields input_ids, ", "use a data set with input_ids, ")),
    ],
)
def test_mismatched_heads(heads: tuple[str, ...], without: str, message: tuple[str, str]) -> None:
    task = build("masked_lm", models.build(**TINY, heads=heads))
    with rejected("made" if without == "masked_ids" else "config.model.heads", ..., *message):
        task.check(made(without))


def test_heads_and_data_that_fit() -> None:
    build("masked_lm", models.build(**TINY, heads=("mlm", "nsp"))).check(made())
    build("masked_lm", models.build(**TINY, heads=("mlm",))).check(made("next_sentence_label"))
