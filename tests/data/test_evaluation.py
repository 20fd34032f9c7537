"""Evaluation batches: every example once, for any batch size and process count."""

import numpy as np
import pytest

from lamb_tpu import data


def index_source(length: int) -> data.ArraySource:
    return data.ArraySource("index:test", {"label": np.arange(length, dtype=np.int32)}, None)


@pytest.mark.parametrize("process_count", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [6, 96, 1200])
def test_every_example_exactly_once(batch_size: int, process_count: int) -> None:
    source = index_source(997)
    shares = [
        list(data.eval_batches(source, batch_size, rows))
        for rows in np.split(np.arange(batch_size), process_count)
    ]
    assert {len(share) for share in shares} == {-(-997 // batch_size)}
    seen = []
    for share in shares:
        for batch in share:
            assert batch["label"].shape == batch["mask"].shape == (batch_size // process_count,)
            assert batch["mask"].dtype == np.float32
            seen.extend(batch["label"][batch["mask"] == 1])
            assert (batch["label"][batch["mask"] == 0] == 0).all()
    assert sorted(seen) == list(range(997))
    assert sum(batch["mask"].sum() for share in shares for batch in share) == 997


def test_process_without_examples_yields_batches() -> None:
    (batch,) = data.eval_batches(index_source(3), 8, np.arange(4, 8))
    assert batch["mask"].tolist() == [0, 0, 0, 0]
    assert batch["label"].tolist() == [0, 0, 0, 0]


def test_full_batches_need_no_padding() -> None:
    batches = list(data.eval_batches(index_source(24), 8))
    assert len(batches) == 3 and all(batch["mask"].all() for batch in batches)
