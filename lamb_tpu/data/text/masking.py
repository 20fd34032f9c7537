"""Masking for masked language modelling: the tokens to predict, and their replacements."""

import numpy as np

from lamb_tpu.data.hashing import below, uniform, words

_ORDER, _KIND, _TOKEN = range(3)  # purposes of a random word
_KEEP_BELOW, _RANDOM_BELOW = 0.1, 0.2  # 10 % stay, 10 % become random, the rest the mask


def mask_tokens(
    ids: np.ndarray,
    is_text: np.ndarray,
    is_head: np.ndarray,
    keys: np.ndarray,
    *,
    mask_id: int,
    vocabulary_size: int,
    max_predictions: int,
    probability: float = 0.15,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Masks examples as `create_pretraining_data.py` of BERT does.

    Of an example of n tokens, including special ones, `round(n * probability)` are predicted, at
    least one and at most `max_predictions`. Words, or single tokens, are taken in random order; a
    word with too many tokens for the remaining number is skipped. A predicted token becomes [MASK]
    in 80 % of the cases, stays in 10 %, and becomes a random token of the vocabulary in 10 %.

    Args:
      ids: int32 (examples, length), special tokens and padding included.
      is_text: bool, same shape: neither special nor padding.
      is_head: bool, same shape: the token begins a word, and the word's other tokens follow it.
        True everywhere masks single tokens. The first token of each run of text is always a head.
      keys: uint64 (examples,): the masking of an example is a function of its key.
      mask_id: id of [MASK].
      vocabulary_size: number of tokens from which random tokens are drawn.
      max_predictions: number of places for predictions.
      probability: share of the tokens that are predicted.

    Returns:
      masked ids int32 (examples, length); and (examples, max_predictions) each: positions int32
      in ascending order, original ids int32, and weights float32, 1 for a prediction. Places
      without a prediction hold 0.
    """
    chosen = _choose(is_text, is_head, keys, max_predictions, probability)
    # Row by row and ascending within a row, which the positions rely on.
    rows, columns = np.nonzero(chosen)
    originals = ids[rows, columns]
    kind = uniform(words(_KIND, keys[rows], columns))
    random_ids = below(words(_TOKEN, keys[rows], columns), vocabulary_size)
    replaced = np.where(kind < _RANDOM_BELOW, random_ids, mask_id)
    masked = ids.astype(np.int32)
    masked[rows, columns] = np.where(kind < _KEEP_BELOW, originals, replaced)

    counts = chosen.sum(1)
    # The rank of each prediction within its row.
    places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions, targets = np.zeros((2, len(ids), max_predictions), np.int32)
    weights = np.zeros((len(ids), max_predictions), np.float32)
    positions[rows, places], targets[rows, places], weights[rows, places] = columns, originals, 1
    return masked, positions, targets, weights


def _choose(
    is_text: np.ndarray,
    is_head: np.ndarray,
    keys: np.ndarray,
    max_predictions: int,
    probability: float,
) -> np.ndarray:
    num_examples, length = is_text.shape
    columns = np.arange(length)
    # The special tokens: [CLS], and a separator behind each run of text.
    before = np.pad(is_text, ((0, 0), (1, 0)))[:, :-1]
    specials = 1 + (is_text & ~before).sum(1)
    # Special tokens count, and halves are rounded to even, as in the original in Python.
    wanted = np.rint((is_text.sum(1) + specials) * probability).astype(np.int64)
    wanted = np.clip(wanted, 1, max_predictions)

    heads = is_text & (is_head | ~before)
    # The column of the head of each token's word, and the number of tokens of each word.
    head_of = np.maximum.accumulate(np.where(heads, columns, 0), axis=1)
    flat_heads = (np.arange(num_examples)[:, None] * length + head_of)[is_text]
    sizes = np.bincount(flat_heads, minlength=is_text.size).reshape(is_text.shape)
    # The shift frees the highest bit for the mark of what is no head.
    random_order = words(_ORDER, keys[:, None], columns) >> np.uint64(1)
    # What is no head comes last.
    order = np.argsort(random_order | ((~heads).astype(np.uint64) << np.uint64(63)), axis=1)
    sizes_in_order = np.take_along_axis(sizes, order, axis=1)
    taken_in_order = np.zeros(is_text.shape, bool)
    taken = np.zeros(num_examples, np.int64)
    # One word of every example at a time, because whether a word fits depends on those before it.
    for rank in range(heads.sum(1).max(initial=0)):
        size = sizes_in_order[:, rank]
        fits = (size > 0) & (taken + size <= wanted)
        taken_in_order[:, rank] = fits
        taken += np.where(fits, size, 0)
        if np.all(taken == wanted):
            break
    taken_heads = np.zeros(is_text.shape, bool)
    np.put_along_axis(taken_heads, order, taken_in_order, axis=1)
    return is_text & np.take_along_axis(taken_heads, head_of, axis=1)
