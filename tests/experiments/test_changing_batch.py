"""The benchmark of the two-program step: contenders make updates, and rows have ratios by round."""

import numpy as np
import pytest

from experiments.bench import changing_batch
from experiments.bench.step_networks import NETWORKS


def test_a_row_has_ratios_round_by_round() -> None:
    host = np.array([0.2, 0.4, 0.2])
    seconds = {
        "one size": host / 1.25,
        "two programs": host,
        "one program": host * 1.5,
        "noise scale": host * 1.01,
        "preconditioned": host * 1.02,
        "halves": host * 1.1,
        "one by one": host * 3,
    }
    line = changing_batch.row("LeNet", 64, 4, seconds)
    figures = "160.0 | 1.250 | 1.875 | 1.010 | 1.020 | 1.100"
    # 99 of 100 updates measure no statistic, so they take as long as updates without statistics.
    assert line == f"| LeNet | 64 | 4 | {figures} | 1.020 |"
    del seconds["one by one"]
    assert changing_batch.row("LeNet", 64, 4, seconds) == f"| LeNet | 64 | 4 | {figures} | - |"


@pytest.mark.long
@pytest.mark.parametrize("batch_norm", [pytest.param(False, marks=pytest.mark.long), True])
def test_contenders_make_updates(batch_norm: bool) -> None:
    model = {"name": "mlp", "hidden_sizes": (8,), "num_classes": 10, "batch_norm": batch_norm}
    network = NETWORKS["LeNet-5"]._replace(model=model, batch=16)
    seconds = changing_batch.measure(network, 2, 1, 0.0)
    known = {"one size", "two programs", "one program", *changing_batch.MEASURED}
    assert set(seconds) == known - ({"one by one"} if batch_norm else set())
    assert all(each.shape == (2, 1) and (each > 0).all() for each in seconds.values())
