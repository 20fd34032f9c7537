"""Masking: equal to BERT's loop in plain Python; frequencies of masks and replacements."""

import numpy as np
import pytest

from lamb_tpu.data import hashing
from lamb_tpu.data.text.masking import mask_tokens

PAD, CLS, SEP, MASK, SIZE = 0, 1, 2, 3, 1000


def made_up(num_examples: int, length: int, seed: int, two: bool = True) -> dict:
    """Makes examples [CLS] A [SEP] (B [SEP]) [PAD] ... with random tokens and starts of words."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((num_examples, length), np.int32)
    is_text = np.zeros(ids.shape, bool)
    for row in range(num_examples):
        runs = rng.multinomial(rng.integers(2, length - 4), [0.5, 0.5]) if two else [length - 2]
        tokens = [CLS]
        for run in np.maximum(runs, 1):
            is_text[row, len(tokens) : len(tokens) + run] = True
            tokens += [*rng.integers(10, SIZE, run), SEP]
        ids[row, : len(tokens)] = tokens
    return {
        "ids": ids,
        "is_text": is_text,
        "is_head": rng.random(ids.shape) < 0.6,
        "keys": hashing.words(seed, np.arange(num_examples)),
    }


def mask(given: dict, **arguments: float) -> tuple[np.ndarray, ...]:
    return mask_tokens(**given, mask_id=MASK, vocabulary_size=SIZE, **arguments)


def plain_mask(
    ids: list[int],
    is_text: list[bool],
    is_head: list[bool],
    key: np.uint64,
    max_predictions: int,
    probability: float,
) -> tuple[list[int], list[tuple[int, int]]]:
    """BERT's `create_masked_lm_predictions`, with random numbers from `hashing`."""
    candidates: list[list[int]] = []
    for i, text in enumerate(is_text):
        if text and not is_head[i] and is_text[i - 1]:
            candidates[-1].append(i)
        elif text:
            candidates.append([i])
    candidates.sort(key=lambda group: int(hashing.words(0, key, group[0])) // 2)
    num_tokens = len([token for token in ids if token != PAD])
    wanted = min(max_predictions, max(1, round(num_tokens * probability)))
    output, predicted = list(ids), []
    for group in candidates:
        if len(predicted) + len(group) > wanted:
            continue
        for i in group:
            kind = hashing.uniform(hashing.words(1, key, i))
            if kind >= 0.2:
                output[i] = MASK
            elif kind >= 0.1:
                output[i] = int(hashing.below(hashing.words(2, key, i), SIZE))
            predicted.append((i, ids[i]))
    return output, sorted(predicted)


@pytest.mark.parametrize("max_predictions, probability", [(20, 0.15), (3, 0.15), (40, 1.0)])
@pytest.mark.parametrize("whole_words", [False, True])
def test_it_is_the_original(max_predictions: int, probability: float, whole_words: bool) -> None:
    given = made_up(60, 48, seed=2)
    if not whole_words:
        given["is_head"][:] = True
    masked, positions, targets, weights = mask(
        given, max_predictions=max_predictions, probability=probability
    )
    assert positions.shape == targets.shape == weights.shape == (60, max_predictions)
    for row in range(60):
        output, predicted = plain_mask(
            *(given[name][row].tolist() for name in ("ids", "is_text", "is_head")),
            given["keys"][row],
            max_predictions,
            probability,
        )
        assert masked[row].tolist() == output
        count = len(predicted)
        assert weights[row].tolist() == [1.0] * count + [0.0] * (max_predictions - count)
        assert list(zip(positions[row, :count], targets[row, :count])) == predicted
        assert not positions[row, count:].any() and not targets[row, count:].any()


@pytest.mark.parametrize("whole_words", [False, True])
def test_shares(whole_words: bool) -> None:
    given = made_up(4000, 128, seed=5, two=False)
    if not whole_words:
        given["is_head"][:] = True
    masked, positions, targets, weights = mask(given, max_predictions=20)
    count = weights.sum()
    assert (weights.sum(1) <= 19).all()  # round(128 * 0.15), fewer than the 20 entries
    if not whole_words:
        assert (weights.sum(1) == 19).all()
    assert count > 0.98 * 19 * 4000
    now = np.take_along_axis(masked, positions, 1)[weights > 0]
    then = targets[weights > 0]
    assert abs((now == MASK).mean() - 0.8) < 0.006
    assert abs((now == then).mean() - 0.1) < 0.005
    others = now[(now != MASK) & (now != then)]
    assert abs(len(others) / count - 0.1) < 0.005
    assert others.min() < 10 and others.max() >= SIZE - 10  # any token, including special ones
    assert abs(others.mean() - SIZE / 2) < 12
    drawn = np.bincount(positions[weights > 0], minlength=128)[1:127]
    assert drawn.min() > 0.8 * drawn.mean() and drawn.max() < 1.2 * drawn.mean()
    if whole_words:  # all tokens of a word are predicted, or none
        chosen = np.zeros(given["ids"].shape, bool)
        np.put_along_axis(chosen, positions, weights > 0, 1)
        inside = ~given["is_head"] & given["is_text"] & (np.arange(128) > 1)
        assert (chosen == np.roll(chosen, 1, axis=1))[inside].all() and inside.sum() > 10_000


def test_nothing_else_changes() -> None:
    given = made_up(50, 40, seed=7)
    masked, positions, _, weights = mask(given, max_predictions=6)
    changed = masked != given["ids"]
    allowed = np.zeros(changed.shape, bool)
    np.put_along_axis(allowed, np.where(weights > 0, positions, 0), True, 1)
    allowed[:, 0] = False
    assert not (changed & ~allowed).any() and not (allowed & ~given["is_text"]).any()


def test_a_word_that_is_too_long_is_passed_over() -> None:
    ids = np.array([[CLS, 10, 11, 12, 13, 14, 15, SEP]], np.int32)
    is_text = np.array([[False] + [True] * 6 + [False]])
    is_head = np.array([[False, True] + [False] * 6])  # a word of six tokens, but one prediction
    keys = hashing.words(0, np.arange(1))
    given = {"ids": ids, "is_text": is_text, "is_head": is_head, "keys": keys}
    masked, _, _, weights = mask(given, max_predictions=20)
    assert weights.sum() == 0 and (masked == ids).all()


def test_more_predictions_than_tokens() -> None:
    given = made_up(3, 10, seed=1)
    _, positions, _, weights = mask(given, max_predictions=30)
    assert positions.shape == weights.shape == (3, 30) and (weights.sum(1) >= 1).all()
