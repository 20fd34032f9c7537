"""Masking for masked language modelling: chooses tokens to predict and their replacements."""

import numpy as np

from lamb_tpu.data.hashing import below, uniform, words

_ORDER, _KIND, _TOKEN = range(3)  # purposes of the random 64-bit words
_KEEP_BELOW, _RANDOM_BELOW = 0.1, 0.2  # 10 % stay, 10 % become a random token, 80 % [MASK]


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
    """Masks examples as BERT's `create_pretraining_data.py` does.

    If an example has n tokens, including special tokens, `round(n * probability)` tokens are
    predicted, at least one and at most `max_predictions`. Words, or single tokens, are chosen in
    random order; a word is skipped if it has more tokens than predictions remain. A predicted token
    becomes [MASK] with probability 80 %, stays unchanged with probability 10 %, and becomes a
    random token of the vocabulary with probability 10 %.

    Args:
      ids: int32 (examples, length), special tokens and padding included.
      is_text: bool, same shape: whether the token is neither special nor padding.
      is_head: bool, same shape: whether the token begins a word; the word's other tokens follow it.
        If all are True, single tokens are masked. The first token of each run of text is always a head.
      keys: uint64 (examples,): the masking of an example is a function of its key.
      mask_id, vocabulary_size, max_predictions, probability: see above; `mask_id` is that of [MASK].

    Returns:
      masked ids, int32 (examples, length); then three arrays (examples, max_predictions): positions,
      int32 in ascending order; original ids, int32; and weights, float32, 1 for a prediction.
      Unused entries hold 0.
    """
    chosen = _choose(is_text, is_head, keys, max_predictions, probability)
    # `np.nonzero` orders tokens by row and then by column, so the positions are ascending.
    rows, columns = np.nonzero(chosen)
    originals = ids[rows, columns]
    kind = uniform(words(_KIND, keys[rows], columns))
    random_ids = below(words(_TOKEN, keys[rows], columns), vocabulary_size)
    replaced = np.where(kind < _RANDOM_BELOW, random_ids, mask_id)
    masked = ids.astype(np.int32)
    masked[rows, columns] = np.where(kind < _KEEP_BELOW, originals, replaced)

    counts = chosen.sum(1)
    # The rank of each prediction within its row.
    ranks = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    positions, targets = np.zeros((2, len(ids), max_predictions), np.int32)
    weights = np.zeros((len(ids), max_predictions), np.float32)
    positions[rows, ranks], targets[rows, ranks], weights[rows, ranks] = columns, originals, 1
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
    # The special tokens are [CLS], and a separator after each run of text.
    before = np.pad(is_text, ((0, 0), (1, 0)))[:, :-1]
    specials = 1 + (is_text & ~before).sum(1)
    # As in the original Python code, special tokens count, and halves are rounded to even.
    wanted = np.rint((is_text.sum(1) + specials) * probability).astype(np.int64)
    wanted = np.clip(wanted, 1, max_predictions)

    heads = is_text & (is_head | ~before)
    # The column of the head of each token's word, and the number of tokens in each word.
    head_of = np.maximum.accumulate(np.where(heads, columns, 0), axis=1)
    flat_heads = (np.arange(num_examples)[:, None] * length + head_of)[is_text]
    sizes = np.bincount(flat_heads, minlength=is_text.size).reshape(is_text.shape)
    # Clears the highest bit, and sets it for all tokens except heads, so that heads come first.
    random_order = words(_ORDER, keys[:, None], columns) >> np.uint64(1)
    order = np.argsort(random_order | ((~heads).astype(np.uint64) << np.uint64(63)), axis=1)
    sizes_in_order = np.take_along_axis(sizes, order, axis=1)
    taken_in_order = np.zeros(is_text.shape, bool)
    taken = np.zeros(num_examples, np.int64)
    # Takes one word of every example at a time: whether a word fits depends on earlier words.
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
