"""A narrow BERT of two layers, and examples to pre-train it, for tests."""

from typing import Any

import numpy as np

TINY: dict[str, Any] = {
    "name": "bert",
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 40,
    "max_positions": 16,
    "dtype": "float32",
}


def examples(num_rows: int, length: int = 12, places: int = 4) -> dict[str, np.ndarray]:
    """Returns rows for masked_lm: about a quarter have `places` masked words, the others 0 or 1."""
    rng = np.random.default_rng(0)
    columns = np.arange(length)
    lengths = rng.integers(length // 2, length + 1, num_rows)[:, None]
    masked = np.where(rng.random(num_rows) < 0.25, places, rng.integers(0, 2, num_rows))
    weights = np.arange(places) < masked[:, None]
    order = rng.random((num_rows, length // 2)).argsort(1)[:, :places]
    ids = rng.integers(5, TINY["vocab_size"], (num_rows, length), np.int32)
    return {
        "input_ids": np.where(columns < lengths, ids, 0).astype(np.int32),
        "token_type_ids": ((columns >= length // 3) & (columns < lengths)).astype(np.int32),
        "attention_mask": columns < lengths,
        "masked_positions": np.where(weights, np.sort(order, 1), 0).astype(np.int32),
        "masked_ids": np.where(weights, ids[:, :places], 0).astype(np.int32),
        "masked_weights": weights.astype(np.float32),
        "next_sentence_label": rng.integers(0, 2, num_rows, np.int32),
    }
