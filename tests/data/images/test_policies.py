"""AutoAugment, RandAugment and random erasing: their tables and their random choices."""

import collections
import pickle
from typing import Any

import numpy as np
import pytest

from lamb_tpu.data.images import policies

IMAGE = np.random.default_rng(0).integers(0, 256, (32, 40, 3), dtype=np.uint8)
# The arguments at levels 0 to 10 by the formulas of the TPU code, without signs.
FACTORS = (0.1, 0.28, 0.46, 0.64, 0.82, 1.0, 1.18, 1.36, 1.54, 1.72, 1.9)
SHARES = (0, 0.03, 0.06, 0.09, 0.12, 0.15, 0.18, 0.21, 0.24, 0.27, 0.3)
TENS = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
LEVELS = {
    "AutoContrast": None,
    "Equalize": None,
    "Invert": None,
    "Rotate": (0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30),
    "Posterize": (0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4),
    "Solarize": (0, 25, 51, 76, 102, 128, 153, 179, 204, 230, 256),
    "Color": FACTORS,
    "Contrast": FACTORS,
    "Brightness": FACTORS,
    "Sharpness": FACTORS,
    "ShearX": SHARES,
    "ShearY": SHARES,
    "TranslateX": TENS,
    "TranslateY": TENS,
    "Cutout": (0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40),
    "SolarizeAdd": (0, 11, 22, 33, 44, 55, 66, 77, 88, 99, 110),
}
SIGNED = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
# Operation, probability in tenths, level.
V0 = """
Equalize 8 1, ShearY 8 4; Color 4 9, Equalize 6 3; Color 4 1, Rotate 6 8;
Solarize 8 3, Equalize 4 7; Solarize 4 2, Solarize 6 2; Color 2 0, Equalize 8 8;
Equalize 4 8, SolarizeAdd 8 3; ShearX 2 9, Rotate 6 8; Color 6 1, Equalize 10 2;
Invert 4 9, Rotate 6 0; Equalize 10 9, ShearY 6 3; Color 4 7, Equalize 6 0;
Posterize 4 6, AutoContrast 4 7; Solarize 6 8, Color 6 9; Solarize 2 4, Rotate 8 9;
Rotate 10 7, TranslateY 8 9; ShearX 0 0, Solarize 8 4; ShearY 8 0, Color 6 4;
Color 10 0, Rotate 6 2; Equalize 8 4, Equalize 0 8; Equalize 10 4, AutoContrast 6 2;
ShearY 4 7, SolarizeAdd 6 7; Posterize 8 2, Solarize 6 10; Solarize 6 8, Equalize 6 1;
Color 8 6, Rotate 4 5
"""


def published() -> list[list[tuple[str, float, int]]]:
    def step(text: str) -> tuple[str, float, int]:
        name, tenths, level = text.split()
        return name, int(tenths) / 10, int(level)

    return [[step(text) for text in line.split(",")] for line in V0.split(";")]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """Records the names and arguments of operations, which then do not change the image."""
    seen: list[tuple[str, tuple[Any, ...]]] = []

    def watched(name: str) -> Any:
        def apply(image: np.ndarray, *arguments: Any) -> np.ndarray:
            assert image is IMAGE
            seen.append((name, arguments))
            return image

        return apply

    for table in (policies.OPERATIONS, policies.AUTOAUGMENT_OPERATIONS):
        for name, operation in table.items():
            monkeypatch.setitem(table, name, operation._replace(apply=watched(name)))
    return seen


def test_policy_is_the_published_one() -> None:
    assert [list(line) for line in policies.AUTOAUGMENT] == published()
    assert len(policies.AUTOAUGMENT) == 25


def test_operations_have_their_own_names() -> None:
    assert list(policies.OPERATIONS) == list(LEVELS)  # in the order of the TPU code
    for name, operation in policies.OPERATIONS.items():
        assert operation.apply.__name__.replace("_", "") == name.lower()
    assert policies.AUTOAUGMENT_OPERATIONS["TranslateY"].apply.__name__ == "translate_y"


@pytest.mark.parametrize("level", range(11))
def test_levels_are_the_published_ones(calls: list[Any], level: int) -> None:
    policy, rng = policies.make_policy("randaugment", 400, level), np.random.default_rng(level)
    policy(IMAGE, rng)
    assert len(calls) == 400 and {name for name, _ in calls} == set(LEVELS)
    signs = collections.defaultdict(set)
    for name, arguments in calls:
        if LEVELS[name] is None:
            assert arguments == ()
            continue
        value, *pixel = arguments
        expected = LEVELS[name][level]
        assert abs(value) == pytest.approx(expected, abs=1e-12)
        assert type(value) is int or name not in ("Posterize", "Solarize", "SolarizeAdd", "Cutout")
        signs[name].add(value >= 0)
        assert len(pixel) == (2 if name == "Cutout" else 0)
        if pixel:
            assert 0 <= pixel[0] < 32 and 0 <= pixel[1] < 40
    if level:
        assert {name for name, actual in signs.items() if len(actual) == 2} == set(SIGNED)


def test_autoaugment_translates_further(calls: list[Any]) -> None:
    policy, rng = policies.make_policy("autoaugment", 2, 10.0), np.random.default_rng(0)
    for _ in range(2000):
        policy(IMAGE, rng)
    values = {arguments for name, arguments in calls if name == "TranslateY"}
    assert values == {(225.0,), (-225.0,)}
    turned = {abs(arguments[0]) for name, arguments in calls if name == "Rotate"}
    assert turned == {0, 6, 15, 21, 24, 27}


def near(count: int, probability: float, trials: int) -> bool:
    """Returns whether a count is within five standard deviations of its expectation."""
    deviation = np.sqrt(trials * probability * (1 - probability))
    return abs(count - trials * probability) <= 5 * deviation


def test_randaugment_draws_all_operations_alike(calls: list[Any]) -> None:
    policy, rng = policies.make_policy("randaugment", 2, 9.5), np.random.default_rng(0)
    for _ in range(4000):
        policy(IMAGE, rng)
    counts = collections.Counter(name for name, _ in calls)
    assert counts.keys() == LEVELS.keys() and all(near(n, 1 / 16, 8000) for n in counts.values())
    pairs = collections.Counter(zip([n for n, _ in calls][::2], [n for n, _ in calls][1::2]))
    assert len(pairs) == 256 and all(near(n, 1 / 256, 4000) for n in pairs.values())
    for name in SIGNED:
        values = [arguments[0] for actual, arguments in calls if actual == name]
        assert near(sum(value > 0 for value in values), 0.5, len(values))
    rows, columns = zip(*(arguments[1:] for name, arguments in calls if name == "Cutout"))
    assert set(rows) == set(range(32)) and set(columns) == set(range(40))


def test_autoaugment_draws_lines_alike_and_steps_by_their_probability(calls: list[Any]) -> None:
    policy, rng, trials = policies.make_policy("autoaugment", 2, 10.0), np.random.default_rng(0), 0
    actual: collections.Counter[tuple[str, ...]] = collections.Counter()
    for _ in range(10000):
        calls.clear()
        policy(IMAGE, rng)
        actual[tuple(name for name, _ in calls)] += 1
        trials += 1
    expected: collections.Counter[tuple[str, ...]] = collections.Counter()
    for (first, p, _), (second, q, _) in published():
        for names, share in [
            ((first, second), p * q),
            ((first,), p * (1 - q)),
            ((second,), (1 - p) * q),
            ((), (1 - p) * (1 - q)),
        ]:
            expected[names] += share / 25
    assert actual.keys() == {names for names, share in expected.items() if share > 0}
    for names, count in actual.items():
        assert near(count, expected[names], trials), names


@pytest.mark.parametrize("name", ["autoaugment", "randaugment"])
def test_generator_alone_decides(name: str) -> None:
    policy = policies.make_policy(name, 2, 9.0)
    again = pickle.loads(pickle.dumps(policy))  # as for worker processes
    before, actual = IMAGE.copy(), []
    for seed in range(40):
        actual.append(policy(IMAGE, np.random.default_rng(seed)))
        np.random.seed(seed)  # noqa: NPY002, must not change the result
        np.testing.assert_array_equal(again(IMAGE, np.random.default_rng(seed)), actual[-1])
        assert actual[-1].shape == IMAGE.shape and actual[-1].dtype == np.uint8
    assert len({image.tobytes() for image in actual}) > 20
    np.testing.assert_array_equal(IMAGE, before)


def box(image: np.ndarray) -> tuple[int, int, int, int]:
    """Returns top, left, height and width of the region that differs from `IMAGE`."""
    changed = (image != IMAGE).any(-1)
    rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
    height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
    assert changed[rows[0] : rows[0] + height, columns[0] : columns[0] + width].mean() > 0.99
    return int(rows[0]), int(columns[0]), int(height), int(width)


def test_random_erasing() -> None:
    rng, before = np.random.default_rng(0), IMAGE.copy()
    actual = [policies.random_erasing(IMAGE, rng, 0.25) for _ in range(4000)]
    np.testing.assert_array_equal(IMAGE, before)
    erased = [image for image in actual if image is not IMAGE]
    assert near(len(erased), 0.25, 4000)
    boxes = np.array([box(image) for image in erased])
    top, left, height, width = boxes.T
    area, ratio = height * width / IMAGE[..., 0].size, height / width
    # Sides are rounded to whole pixels.
    assert 0.015 < area.min() < 0.03 and 0.37 < area.max() < 0.42
    assert 0.2 < ratio.min() < 0.4 and 2.8 < ratio.max() < 4.2
    assert height.max() < 32 and width.max() < 40
    # All positions that fit are equally likely.
    for start, size, full in ((top, height, 32), (left, width, 40)):
        assert start.min() == 0 and (start + size).max() == full
        assert abs(((start + 0.5) / (full - size + 1)).mean() - 0.5) < 5 * 0.29 / 30
    y, x, h, w = boxes[0]
    inside = erased[0][y : y + h, x : x + w].astype(float)
    assert abs(inside.mean() - 127.5) < 5 * 74 / np.sqrt(inside.size)
    assert abs(inside.std() - 73.9) < 5 and abs(inside[..., 0] - inside[..., 1]).mean() > 40


def test_random_erasing_by_its_seed_and_where_nothing_fits() -> None:
    first, second, other = (
        policies.random_erasing(IMAGE, np.random.default_rng(seed), 1.0) for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(first, second)
    assert (first != other).any() and first is not IMAGE
    assert policies.random_erasing(IMAGE, np.random.default_rng(3), 0.0) is IMAGE
    one = np.zeros((1, 50, 3), np.uint8)
    assert policies.random_erasing(one, np.random.default_rng(0), 1.0) is one
