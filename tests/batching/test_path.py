"""Tests paths: decisions, segments, numbers of examples, and the end of a run."""

import json
from collections.abc import Iterable

import numpy as np
import pytest

from lamb_tpu.batching.path import Path, describe, follow
from lamb_tpu.batching.rules import Constant, NoiseScale, Ramp

RAMP = Ramp(granularity=16, points=((0, 16), (64, 32), (192, 128)))


def grown(batch: int, total: int, changes: Iterable[tuple[int, int]]) -> Path:
    path = Path.from_segments([(0, batch)], total)
    for step, size in changes:
        path = path.change(step, size)
    return path


def test_every_update_of_a_ramp() -> None:
    path = follow(RAMP, 64, total=768, most=100)
    sizes = [16] * 4 + [32] * 4 + [128] * 4 + [64]  # the last batch is cut
    assert path.updates == len(sizes) and path.batches().tolist() == sizes
    assert [path.batch(step) for step in range(14)] == [*sizes, 0]
    assert [path.examples(step) for step in range(14)] == [0, *np.cumsum(sizes)]
    assert (path.smallest, path.largest) == (16, 128)
    assert list(path.changes()) == [(0, 0, 16), (4, 64, 32), (8, 192, 128), (12, 704, 64)]


def test_repeated_sizes_are_one_segment() -> None:
    constant = follow(Constant(granularity=8), 64, total=640, most=10)
    assert (constant.segments, constant.updates) == ([(0, 64)], 10)
    again = Ramp(granularity=8, points=((0, 8), (16, 8), (24, 16), (40, 8)))
    assert follow(again, 8, total=48, most=10).segments == [(0, 8), (3, 16), (4, 8)]
    # The cut last batch equals the batch before it.
    assert grown(16, 48, [(2, 32)]).segments == [(0, 16)]


def test_a_decision_holds_for_the_interval() -> None:
    ramp = Ramp(granularity=16, points=RAMP.points, interval=3)
    # The rule decides before updates 0, 3, 6 and 9.
    assert follow(ramp, 64, total=768, most=100).batches().tolist() == (
        [16] * 3 + [16] * 3 + [32] * 3 + [128] * 4 + [64]
    )


def test_a_decision_changes_only_later_updates() -> None:
    """A decision changes the batch sizes and the number of later updates, but no earlier update."""
    path, rng = grown(32, 4096, []), np.random.default_rng(0)
    sizes = list[int]()
    while path.examples(len(sizes)) < path.total:
        step = len(sizes)
        assert [path.batch(past) for past in range(step)] == sizes
        assert path.examples(step) == sum(sizes)
        assert path.updates > step and path.batches().sum() == path.total
        middle = step // 2
        ahead = path.batches(middle, step + 3).tolist()
        assert ahead == path.batches().tolist()[middle : step + 3]
        if step % 3 == 0:
            path = path.change(step, int(rng.integers(1, 12)) * 8)
        sizes.append(path.batch(step))
    assert path.batches().tolist() == sizes and path.updates == len(sizes) > 30


def test_decisions_pass_through_a_checkpoint() -> None:
    path = follow(RAMP, 64, total=768, most=100)
    assert path.until(3) == [[0, 16]]
    assert path.until(4) == path.until(7) == [[0, 16], [4, 32]]
    assert json.loads(json.dumps(path.until(13))) == [list(segment) for segment in path.segments]
    for step in range(14):
        # `until` includes the decision for the next update, but no later decision.
        other = Path.from_segments(path.until(step), 768)
        assert other.batches(0, step + 1).tolist() == path.batches(0, step + 1).tolist()
        assert other.examples(step) == path.examples(step)
    assert other.updates == 13


def test_a_path_of_many_segments_is_shortened() -> None:
    line = Ramp(granularity=1, points=((0, 1), (1000, 40)), linear=True)
    output = describe(follow(line, 1, total=5000, most=1000))
    # The last batch is cut to the remaining examples.
    assert output.startswith("1, 2 from update 26 (26 examples), 3 from update 39 (52 examples), ")
    assert output.endswith(", 31 more changes, 29 from update 210 (4,971 examples)")
    assert output.count("from update") == 6


def test_errors() -> None:
    with pytest.raises(ValueError, match="the run would have more than 9 updates"):
        follow(RAMP, 64, total=768, most=9)
    with pytest.raises(ValueError, match="the rule needs the statistic 'noise_scale'"):
        follow(NoiseScale(granularity=8, upper=64), 64, total=640, most=100)
    path = grown(16, 256, [(4, 32)])
    for step in (3, 10):
        with pytest.raises(ValueError, match=f"^the batch size of update {step} cannot change: it"):
            path.change(step, 64)
