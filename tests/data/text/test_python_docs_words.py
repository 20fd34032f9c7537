"""Python's help topics as streams of words."""

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.errors import UserError


def load(split: str, **options: object) -> data.Source:
    training = split == "train"
    return data.load("python_docs_words", split, options=options, training=training, batch_size=16)


def test_splits_share_a_vocabulary() -> None:
    train, test = load("train", vocab_size=500), load("test", vocab_size=500)
    assert train.num_classes == test.num_classes == 500 and train.streams == 16
    assert len(train) * 20 > 20_000 and test.arrays["length"][0] > 5_000
    unknown = 499
    words = train.gather(np.arange(len(train)))["inputs"]
    counts = np.bincount(words.ravel(), minlength=500)
    assert counts[unknown] > 0 and (np.diff(counts[:50]) < 20).all()
    assert 0.05 < np.mean(test.arrays["targets"] == unknown) < 0.5


def test_mistakes() -> None:
    with pytest.raises(UserError, match="config.data.options.vocab_size is 1; it must be at leas"):
        load("train", vocab_size=1)
    with pytest.raises(UserError, match="have no split 'valid'; they have train and test"):
        load("valid")
