"""Data sets of random examples in memory, for benchmarks of a step; `config.data.name` selects them."""

import numpy as np

from lamb_tpu.data import ArraySource


def images(split: str, size: int = 28, channels: int = 1, count: int = 64) -> ArraySource:
    """Returns images of random pixels, each with a random label of ten classes."""
    rng = np.random.default_rng(0)
    arrays = {
        "image": rng.integers(256, size=(count, size, size, channels), dtype=np.uint8),
        "label": rng.integers(10, size=count, dtype=np.int32),
    }
    return ArraySource(f"random images:{size},{channels},{count}", arrays, num_classes=10)


def masked_text(
    split: str, length: int = 128, predicted: int = 20, words: int = 8192, count: int = 32
) -> ArraySource:
    """Returns random words, `predicted` of them masked, with the fields of the task masked_lm."""
    rng = np.random.default_rng(0)
    positions = np.stack([np.sort(rng.permutation(length)[:predicted]) for _ in range(count)])
    arrays = {
        "input_ids": rng.integers(words, size=(count, length), dtype=np.int32),
        "token_type_ids": np.zeros((count, length), np.int32),
        "attention_mask": np.ones((count, length), bool),
        "masked_positions": positions.astype(np.int32),
        "masked_ids": rng.integers(words, size=(count, predicted), dtype=np.int32),
        "masked_weights": np.ones((count, predicted), np.float32),
        "next_sentence_label": rng.integers(2, size=count, dtype=np.int32),
    }
    return ArraySource(f"random text:{length},{predicted},{words},{count}", arrays, None)
