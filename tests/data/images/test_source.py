"""Images as a source: determinism, augmentation, and treatment of bad records."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lamb_tpu import data
from lamb_tpu.data.images import source as source_module
from lamb_tpu.data.images.policies import make_policy
from lamb_tpu.data.images.records import Record
from lamb_tpu.data.images.source import ImageOptions, ImageSource
from tests.data.images.photographs import (
    ROTATED,
    bicubic,
    bilinear,
    claiming,
    decode,
    encode,
    smooth,
)
from tests.raising import rejected

SIZE = 32
TYPES = ("rgb", "rgb", "rgb", "grey", "cmyk", "png")
CONTENTS = [
    encode(smooth(50 + index, 75 - index, index), TYPES[index % len(TYPES)]) for index in range(40)
]


class Images:
    notes = ("a note",)
    num_classes = 4

    def __init__(self, records: list[Record] | None = None) -> None:
        self.records = records or [
            Record(content, index % 4) for index, content in enumerate(CONTENTS)
        ]

    def __len__(self) -> int:
        return len(self.records)

    def read(self, indices: list[int]) -> list[Record]:
        return [self.records[index] for index in indices]

    def name(self, index: int) -> str:
        return f"image {index}"


def make(
    records: list[Record] | None = None, seed: int = 3, training: bool = True, **options: object
) -> ImageSource:
    options = ImageOptions(**{"size": SIZE, "threads": 2} | options)
    return ImageSource("own", Images(records), options, seed, training)


def images(source: ImageSource, indices: object, epochs: object = 0) -> np.ndarray:
    return source.gather(np.array(indices), epochs)["image"]


def test_attributes() -> None:
    source = make()
    assert len(source) == 40 and source.num_classes == 4 and source.notes == ("a note",)
    batch = source.gather(np.array([5, 2, 5]))
    assert batch.keys() == {"image", "label"}  # no mask in training
    assert batch["image"].dtype == np.uint8 and batch["image"].shape == (3, SIZE, SIZE, 3)
    assert batch["label"].dtype == np.int32 and batch["label"].tolist() == [1, 2, 1]
    assert {field: spec.shape for field, spec in source.element_spec.items()} == {
        "image": (SIZE, SIZE, 3),
        "label": (),
    }
    assert source.gather(np.array([], np.int64))["image"].shape == (0, SIZE, SIZE, 3)


ALL = {"policy": "randaugment", "policy_layers": 1, "erasing": 0.5}


@pytest.mark.parametrize("options", [{}, ALL, {"crop": "pad"}])
def test_threads_order_and_company_change_nothing(options: dict) -> None:
    indices, epochs = np.arange(80) % 40, np.arange(80) // 40
    expected = images(make(threads=1, **options), indices, epochs)
    np.testing.assert_array_equal(images(make(threads=4, **options), indices, epochs), expected)
    shuffled = np.random.default_rng(0).permutation(80)
    source = make(threads=3, **options)
    np.testing.assert_array_equal(
        images(source, indices[shuffled], epochs[shuffled]), expected[shuffled]
    )
    for index in (0, 41):
        np.testing.assert_array_equal(
            images(source, [indices[index]], epochs[index])[0], expected[index]
        )
    assert (expected[:40] != expected[40:]).any((1, 2, 3)).sum() > 35
    assert (images(make(seed=4, **options), indices, epochs) != expected).any()


def test_processes_share_the_batches() -> None:
    full = data.TrainLoader(make(), 12, seed=7)
    rows = [np.arange(0, 12, 2), np.arange(1, 12, 2)]
    loaders = [data.TrainLoader(make(), 12, seed=7, rows=share_rows) for share_rows in rows]
    for _ in range(5):  # into the second epoch
        batch, shares = next(full), [next(loader) for loader in loaders]
        for share_rows, share in zip(rows, shares):
            np.testing.assert_array_equal(batch["image"][share_rows], share["image"])
            np.testing.assert_array_equal(batch["label"][share_rows], share["label"])


def centre(
    content: bytes, fraction: float = 0.875, resize: Callable[..., np.ndarray] = bilinear
) -> np.ndarray:
    full = decode(content)
    side = int(fraction * min(full.shape[:2]))
    top, left = ((extent - side + 1) // 2 for extent in full.shape[:2])
    return resize(full[top : top + side, left : left + side], SIZE)


@pytest.mark.parametrize("fraction, share", [(0.875, 0.875), (0.0, SIZE / (SIZE + 32)), (0.7, 0.7)])
def test_evaluation_takes_the_centre(fraction: float, share: float) -> None:
    augmented = {"crop": "inception", "erasing": 1.0, "policy": "autoaugment"}
    source = make(training=False, central_fraction=fraction, **augmented)
    actual = images(source, range(12), np.arange(12))
    np.testing.assert_array_equal(actual, images(source, range(12)))
    for image, content in zip(actual, CONTENTS):
        assert np.abs(image - centre(content, share)).max() < 1.6


def test_half_are_mirrored() -> None:
    expected = centre(CONTENTS[0])
    for flip, low, high in ((True, 250, 350), (False, 0, 0)):
        actual = images(make(crop="none", flip=flip), np.zeros(600, int), np.arange(600))
        straight, mirrored = (
            (np.abs(actual - image).max((1, 2, 3)) < 1.6) for image in (expected, expected[:, ::-1])
        )
        assert (straight ^ mirrored).all() and low <= mirrored.sum() <= high


def test_pad_moves_by_up_to_four_pixels() -> None:
    actual = images(make(crop="pad", flip=False), np.zeros(1000, int), np.arange(1000))
    middle = images(make(training=False), [0])[0]
    padded = np.zeros((SIZE + 8, SIZE + 8, 3), np.uint8)
    padded[4:-4, 4:-4] = middle
    allowed = {
        padded[top : top + SIZE, left : left + SIZE].tobytes()
        for top in range(9)
        for left in range(9)
    }
    assert {image.tobytes() for image in actual} == allowed


def test_inception_crops_the_image() -> None:
    """In the test image, red encodes a pixel's column and green encodes its row."""
    rows, columns = np.mgrid[0:100, 0:100]
    pixels = np.stack([columns * 2, rows * 2, np.zeros((100, 100))], -1).astype(np.uint8)
    record = Record(encode(pixels, "png"), 0)
    actual = images(make([record]), np.zeros(400, int), np.arange(400)) / 2.0
    left, right = actual[:, :, 0, 0].mean(1), actual[:, :, -1, 0].mean(1)
    top, bottom = actual[:, 0, :, 1].mean(1), actual[:, -1, :, 1].mean(1)
    # The distance from the first pixel's centre to the last pixel's centre is 31/32 of the box.
    widths, heights = abs(right - left) * SIZE / (SIZE - 1), (bottom - top) * SIZE / (SIZE - 1)
    assert (heights > 0).all() and 150 < (right < left).sum() < 250
    areas, ratios = widths * heights / 1e4, widths / heights
    assert areas.min() > 0.06 and areas.max() < 1.1 and areas.std() > 0.15
    assert ratios.min() > 0.68 and ratios.max() < 1.47 and 0.95 < ratios.mean() < 1.13
    small = images(make([record], min_area=0.9), np.zeros(200, int), np.arange(200)) / 2.0
    assert np.abs(small[:, :, 0, 0] - small[:, :, -1, 0]).min() > 75


def test_box_of_the_full_image_becomes_the_centre() -> None:
    """In the TPU code, a box of the full image counts as a failed draw."""
    square = Record(encode(smooth(60, 60), "png"), 0)
    actual = images(make([square], min_area=1.0, flip=False), np.zeros(30, int), np.arange(30))
    for image in actual:
        assert np.abs(image - centre(square.content)).max() < 1.6


@pytest.mark.parametrize("training", [True, False])
def test_bicubic(training: bool) -> None:
    options = {"crop": "none", "flip": False, "training": training}
    actual = images(make(resize="bicubic", **options), range(12))
    for image, content in zip(actual, CONTENTS):
        assert np.abs(image - np.clip(centre(content, resize=bicubic), 0, 255)).max() < 2.5
    assert (actual != images(make(**options), range(12))).any((1, 2, 3)).all()


def test_policy_and_erasing_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def spy(*arguments: object) -> object:
        asked.append(arguments)
        return lambda image, rng: np.full_like(image, image[0, 0, 0] // 2)

    monkeypatch.setattr(source_module, "make_policy", spy)
    options = {"policy": "randaugment", "policy_layers": 3, "policy_magnitude": 7.5}
    actual = images(make(**options), range(10))
    assert asked == [("randaugment", 3, 7.5)]
    assert (actual == actual[:, :1, :1, :1]).all()
    erased = images(make(**options, erasing=1.0), range(10))
    assert all(len(np.unique(image)) > 20 for image in erased)
    assert callable(make_policy("randaugment", 3, 7.5))


def test_kinds_are_counted_once() -> None:
    source = make()
    for epoch in range(2):
        source.gather(np.arange(40), epoch)
    assert source.tally.counts() == {"cmyk": 6, "grey": 7, "png": 6}


def test_rotation_tags_are_counted() -> None:
    rotated = encode(smooth(40, 60, 1), exif=ROTATED)
    source = make([Record(content, 0) for content in (CONTENTS[0], rotated)])
    for _ in range(2):
        source.gather(np.arange(2))
    assert source.tally.counts() == {"rotated": 1}
    assert "1 with an EXIF rotation tag (which is ignored)" in source.tally.describe()


def with_bad(**bad: Record) -> list[Record]:
    records = Images().records[:8]
    for index, record in bad.items():
        records[int(index.removeprefix("at"))] = record
    return records


BAD = {
    "corrupt": (Record(CONTENTS[0][:-40], 0), "it ends before its end marker"),
    "empty": (Record(b"", 0), "the file is empty"),
    "text": (Record(b"<html>", 0), "it is not an image; use JPEG, PNG, WebP or BMP"),
    "unread": (Record(b"", 0, "Permission denied"), "Permission denied"),
    "huge": (
        Record(claiming("rgb", 65_500, 65_500), 0),
        "it claims 65,500 x 65,500 pixels, whose decoding takes 25,742 MB (6 bytes per pixel of a "
        "JPEG), more than the 600 MB that config.data.options.max_megapixels=100 allows",
    ),
    "high": (Record(CONTENTS[0], 4), "its label is 4, out of the range 0 to 3"),
    "low": (Record(CONTENTS[0], -1), "its label is -1, out of the range 0 to 3"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_records_end_the_run(kind: str) -> None:
    record, reason = BAD[kind]
    source = make(with_bad(at2=record, at5=record))
    source.gather(np.array([0, 1, 3, 4]))
    with rejected("image 2 of data set own", ..., f"is bad: {reason}", "on_bad_record='skip'"):
        source.gather(np.arange(8))


@pytest.mark.parametrize("kind", BAD)
def test_bad_records_are_replaced(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    record, reason = BAD[kind]
    source = make(
        with_bad(at2=record, at3=record, at7=record), on_bad_record="skip", crop="none", flip=False
    )
    good = images(make(crop="none", flip=False), range(8))
    with caplog.at_level(logging.WARNING):
        batches = [source.gather(np.arange(8), epoch) for epoch in range(2)]
    for batch in batches:
        # The next good example replaces a bad example: 4 replaces 2 and 3, and 0 replaces 7.
        np.testing.assert_array_equal(batch["image"], good[[0, 1, 4, 4, 4, 5, 6, 0]])
        assert batch["label"].tolist() == [0, 1, 0, 0, 0, 1, 2, 0]
    assert source.tally.counts()["bad"] == 3
    output = [item.getMessage() for item in caplog.records]
    assert len(output) == 3 and all(reason in text for text in output)
    names = {text.split("own: ")[1].split(" is")[0] for text in output}
    assert names == {"image 2", "image 3", "image 7"}


@pytest.mark.parametrize("kind", BAD)
def test_evaluation_skips_bad_records(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    record, reason = BAD[kind]
    source = make(with_bad(at2=record, at7=record), training=False, on_bad_record="skip")
    with caplog.at_level(logging.WARNING):
        batches = list(data.eval_batches(source, 3))
    # There are nine rows, the last of which is padding.
    mask = np.concatenate([batch["mask"] for batch in batches])
    assert mask.dtype == np.float32 and mask.tolist() == [1, 1, 0, 1, 1, 1, 1, 0, 0]
    labels = np.concatenate([batch["label"] for batch in batches])
    assert labels[mask == 1].tolist() == [0, 1, 3, 0, 1, 2]
    good = images(make(training=False), range(8))
    actual = np.concatenate([batch["image"] for batch in batches])
    np.testing.assert_array_equal(actual[mask == 1], good[[0, 1, 3, 4, 5, 6]])
    output = [item.getMessage() for item in caplog.records]
    assert sorted(text.rpartition(" (")[0] for text in output) == [
        f"data set own: image {index} is left out, and does not count: {reason}" for index in (2, 7)
    ]


@pytest.mark.parametrize("training", [True, False])
def test_limit_of_pixels(training: bool) -> None:
    records = [Record(content, 0) for content in CONTENTS[:3]]  # 50 x 75, 51 x 74, 52 x 73 pixels
    make(records, training=training, max_megapixels=0.003796).gather(np.arange(3))
    with rejected("image 2 of data set own", ..., "is bad: it claims 52 x 73 pixels, whose"):
        make(records, training=training, max_megapixels=0.003795).gather(np.arange(3))


def test_nothing_but_bad_records() -> None:
    source = make([Record(b"", 0)] * 5, on_bad_record="skip")
    with rejected(
        "data set own", ..., "has 100 bad records in a row, the last of which is image 0"
    ):
        source.gather(np.array([1]))


@pytest.mark.parametrize(
    "option, value, problem, remedy",
    [
        ("size", 7, "is out of range", "use 8 to 16384"),
        ("central_fraction", 1.1, "is out of range", "use 0 to 1"),
        ("max_megapixels", 0.0, "is out of range", "use a number above 0"),
        ("max_megapixels", float("nan"), "is out of range", "use a number above 0"),
        ("min_covered", 1.5, "is out of range", "use 0 to 1"),
        ("resize", "cubic", "is unknown", "use bilinear or bicubic"),
        ("min_area", 0.0, "is out of range", "use more than 0 and at most 1"),
        ("erasing", -0.5, "is out of range", "use 0 to 1"),
        ("threads", -1, "is out of range", "use 0 to 1024"),
        ("policy", "augmix", "is unknown", "use '', autoaugment or randaugment"),
        ("policy_layers", 0, "is out of range", "use 1 to 100"),
        ("policy_magnitude", 11.0, "is out of range", "use 0 to 10"),
        ("policy_magnitude", float("nan"), "is out of range", "use 0 to 10"),
        ("on_bad_record", "ignore", "is unknown", "use error or skip"),
    ],
)
def test_errors(option: str, value: Any, problem: str, remedy: str) -> None:
    shown = value if value == value else ...  # NaN differs from itself
    with rejected(f"config.data.options.{option}", shown, problem, remedy):
        ImageOptions(**{option: value})
