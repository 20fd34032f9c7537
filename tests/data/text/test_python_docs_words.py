"""Python's help topics as streams of words."""

import numpy as np

from lamb_tpu import data
from tests.raising import rejected


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


def test_errors() -> None:
    with rejected("config.data.options.vocab_size", 1, "is out of range", "use at least 2"):
        load("train", vocab_size=1)
    with rejected("split of Python's help topics", "valid", "is unknown"):
        load("valid")
