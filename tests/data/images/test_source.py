"""Pictures as a source: determinism, augmentation, and what happens to bad records."""

import logging
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from lamb_tpu import data
from lamb_tpu.data.images import source as source_module
from lamb_tpu.data.images.policies import make_policy
from lamb_tpu.data.images.records import Record
from lamb_tpu.data.images.source import ImageSource, Options
from lamb_tpu.errors import UserError
from tests.data.images.pictures import bicubic, bilinear, claiming, decode, encode, smooth

SIZE = 32
KINDS = ("rgb", "rgb", "rgb", "grey", "cmyk", "png")
CONTENTS = [
    encode(smooth(50 + index, 75 - index, index), KINDS[index % len(KINDS)]) for index in range(40)
]


class Pictures:
    """Records in memory."""

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
        return f"picture {index}"


def make(
    records: list[Record] | None = None, seed: int = 3, training: bool = True, **options: object
) -> ImageSource:
    options = Options(**{"size": SIZE, "threads": 2} | options)
    return ImageSource("own", Pictures(records), options, seed, training)


def images(source: ImageSource, indices: object, epochs: object = 0) -> np.ndarray:
    return source.gather(np.array(indices), epochs)["image"]


def test_what_a_source_is() -> None:
    source = make()
    assert len(source) == 40 and source.num_classes == 4 and source.notes == ("a note",)
    batch = source.gather(np.array([5, 2, 5]))
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
    for place in (0, 41):
        np.testing.assert_array_equal(
            images(source, [indices[place]], epochs[place])[0], expected[place]
        )
    assert (expected[:40] != expected[40:]).any((1, 2, 3)).sum() > 35
    assert (images(make(seed=4, **options), indices, epochs) != expected).any()


def test_processes_share_the_batches() -> None:
    whole = data.TrainLoader(make(), 12, seed=7)
    rows = [np.arange(0, 12, 2), np.arange(1, 12, 2)]
    parts = [data.TrainLoader(make(), 12, seed=7, rows=own) for own in rows]
    for _ in range(5):  # into the second epoch
        batch, shares = next(whole), [next(part) for part in parts]
        for own, share in zip(rows, shares):
            np.testing.assert_array_equal(batch["image"][own], share["image"])
            np.testing.assert_array_equal(batch["label"][own], share["label"])


def centre(
    content: bytes, fraction: float = 0.875, resize: Callable[..., np.ndarray] = bilinear
) -> np.ndarray:
    whole = decode(content)
    side = int(fraction * min(whole.shape[:2]))
    top, left = ((extent - side + 1) // 2 for extent in whole.shape[:2])
    return resize(whole[top : top + side, left : left + side], SIZE)


@pytest.mark.parametrize("fraction, share", [(0.875, 0.875), (0.0, SIZE / (SIZE + 32)), (0.7, 0.7)])
def test_evaluation_takes_the_centre(fraction: float, share: float) -> None:
    source = make(
        training=False,
        central_fraction=fraction,
        crop="inception",
        erasing=1.0,
        policy="autoaugment",
    )
    found = images(source, range(12), np.arange(12))
    np.testing.assert_array_equal(found, images(source, range(12)))
    for image, content in zip(found, CONTENTS):
        assert np.abs(image - centre(content, share)).max() < 1.6


def test_half_are_mirrored() -> None:
    expected = centre(CONTENTS[0])
    for flip, low, high in ((True, 250, 350), (False, 0, 0)):
        found = images(make(crop="none", flip=flip), np.zeros(600, int), np.arange(600))
        straight, mirrored = (
            (np.abs(found - picture).max((1, 2, 3)) < 1.6)
            for picture in (expected, expected[:, ::-1])
        )
        assert (straight ^ mirrored).all() and low <= mirrored.sum() <= high


def test_pad_moves_by_up_to_four_pixels() -> None:
    found = images(make(crop="pad", flip=False), np.zeros(1000, int), np.arange(1000))
    middle = images(make(training=False), [0])[0]
    padded = np.zeros((SIZE + 8, SIZE + 8, 3), np.uint8)
    padded[4:-4, 4:-4] = middle
    allowed = {
        padded[top : top + SIZE, left : left + SIZE].tobytes()
        for top in range(9)
        for left in range(9)
    }
    assert {image.tobytes() for image in found} == allowed


def test_inception_takes_parts_of_the_picture() -> None:
    """A picture whose colour tells the place: red the column, green the row."""
    rows, columns = np.mgrid[0:100, 0:100]
    pixels = np.stack([columns * 2, rows * 2, np.zeros((100, 100))], -1).astype(np.uint8)
    record = Record(encode(pixels, "png"), 0)
    found = images(make([record]), np.zeros(400, int), np.arange(400)) / 2.0
    left, right = found[:, :, 0, 0].mean(1), found[:, :, -1, 0].mean(1)
    top, bottom = found[:, 0, :, 1].mean(1), found[:, -1, :, 1].mean(1)
    # From the first pixel's centre to the last one's is 31/32 of the box.
    widths, heights = abs(right - left) * SIZE / (SIZE - 1), (bottom - top) * SIZE / (SIZE - 1)
    assert (heights > 0).all() and 150 < (right < left).sum() < 250
    areas, ratios = widths * heights / 1e4, widths / heights
    assert areas.min() > 0.06 and areas.max() < 1.1 and areas.std() > 0.15
    assert ratios.min() > 0.68 and ratios.max() < 1.47 and 0.95 < ratios.mean() < 1.13
    small = images(make([record], min_area=0.9), np.zeros(200, int), np.arange(200)) / 2.0
    assert np.abs(small[:, :, 0, 0] - small[:, :, -1, 0]).min() > 75


def test_where_the_box_is_the_whole_the_centre_is_taken() -> None:
    """The TPU code's rule: a box of the whole picture means that none was found."""
    square = Record(encode(smooth(60, 60), "png"), 0)
    found = images(make([square], min_area=1.0, flip=False), np.zeros(30, int), np.arange(30))
    for image in found:
        assert np.abs(image - centre(square.content)).max() < 1.6


@pytest.mark.parametrize("training", [True, False])
def test_bicubic(training: bool) -> None:
    options = {"crop": "none", "flip": False, "training": training}
    found = images(make(resize="bicubic", **options), range(12))
    for image, content in zip(found, CONTENTS):
        assert np.abs(image - np.clip(centre(content, resize=bicubic), 0, 255)).max() < 2.5
    assert (found != images(make(**options), range(12))).any((1, 2, 3)).all()


def test_policy_and_erasing_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def spy(*arguments: object) -> object:
        asked.append(arguments)
        return lambda image, rng: np.full_like(image, image[0, 0, 0] // 2)

    monkeypatch.setattr(source_module, "make_policy", spy)
    options = {"policy": "randaugment", "policy_layers": 3, "policy_magnitude": 7.5}
    found = images(make(**options), range(10))
    assert asked == [("randaugment", 3, 7.5)]
    assert (found == found[:, :1, :1, :1]).all()
    erased = images(make(**options, erasing=1.0), range(10))
    assert all(len(np.unique(image)) > 20 for image in erased)
    assert callable(make_policy("randaugment", 3, 7.5))


def test_kinds_are_counted_once() -> None:
    source = make()
    for epoch in range(2):
        source.gather(np.arange(40), epoch)
    assert source.tally.counts() == {"cmyk": 6, "grey": 7, "png": 6}


def test_rotation_tags_are_counted() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    source = make(
        [Record(content, 0) for content in (CONTENTS[0], encode(smooth(40, 60, 1), exif=exif))]
    )
    for _ in range(2):
        source.gather(np.arange(2))
    assert source.tally.counts() == {"rotated": 1}
    assert "1 with an EXIF rotation tag (which is ignored)" in source.tally.describe()


def with_bad(**bad: Record) -> list[Record]:
    records = Pictures().records[:8]
    for place, record in bad.items():
        records[int(place.removeprefix("at"))] = record
    return records


BAD = {
    "corrupt": (Record(CONTENTS[0][:-40], 0), "it ends before its end marker"),
    "empty": (Record(b"", 0), "the file is empty"),
    "text": (Record(b"<html>", 0), "it is not an image; JPEG, PNG, WebP and BMP are read"),
    "unread": (Record(b"", 0, "Permission denied"), "Permission denied"),
    "huge": (
        Record(claiming("rgb", 65_500, 65_500), 0),
        "it claims 65,500 x 65,500 pixels, more than the 100 million that "
        "config.data.options.max_megapixels allows",
    ),
    "high": (Record(CONTENTS[0], 4), "its label is 4, out of the range 0 to 3"),
    "low": (Record(CONTENTS[0], -1), "its label is -1, out of the range 0 to 3"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_records_end_the_run(kind: str) -> None:
    record, reason = BAD[kind]
    source = make(with_bad(at2=record, at5=record))
    source.gather(np.array([0, 1, 3, 4]))
    told = f"data set own: picture 2 is bad: {reason}; mend or remove it, or go on without such"
    with pytest.raises(UserError, match=told):
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
        # The next good one stands in: 4 for 2 and 3, and for the last the first.
        np.testing.assert_array_equal(batch["image"], good[[0, 1, 4, 4, 4, 5, 6, 0]])
        assert batch["label"].tolist() == [0, 1, 0, 0, 0, 1, 2, 0]
    assert source.tally.counts()["bad"] == 3
    told = [item.getMessage() for item in caplog.records]
    assert len(told) == 3 and all(reason in text for text in told)
    assert {text.split("own: ")[1].split(" is")[0] for text in told} == {
        "picture 2",
        "picture 3",
        "picture 7",
    }


@pytest.mark.parametrize("kind", BAD)
def test_bad_records_do_not_count_in_an_evaluation(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    record, reason = BAD[kind]
    source = make(with_bad(at2=record, at7=record), training=False, on_bad_record="skip")
    with caplog.at_level(logging.WARNING):
        batches = list(data.eval_batches(source, 3))
    # Of nine places the last is padding.
    mask = np.concatenate([batch["mask"] for batch in batches])
    assert mask.dtype == np.float32 and mask.tolist() == [1, 1, 0, 1, 1, 1, 1, 0, 0]
    labels = np.concatenate([batch["label"] for batch in batches])
    assert labels[mask == 1].tolist() == [0, 1, 3, 0, 1, 2]
    good = images(make(training=False), range(8))
    found = np.concatenate([batch["image"] for batch in batches])
    np.testing.assert_array_equal(found[mask == 1], good[[0, 1, 3, 4, 5, 6]])
    told = [item.getMessage() for item in caplog.records]
    assert sorted(text.split(" (")[0] for text in told) == [
        f"data set own: picture {index} is left out, and does not count: {reason}"
        for index in (2, 7)
    ]


@pytest.mark.parametrize("training", [True, False])
def test_limit_of_pixels(training: bool) -> None:
    records = [Record(content, 0) for content in CONTENTS[:3]]  # 50 x 75, 51 x 74, 52 x 73 pixels
    make(records, training=training, max_megapixels=0.003796).gather(np.arange(3))
    with pytest.raises(UserError, match="picture 2 is bad: it claims 52 x 73 pixels, more than"):
        make(records, training=training, max_megapixels=0.003795).gather(np.arange(3))


def test_what_is_trained_on_has_no_mask() -> None:
    assert make().gather(np.arange(3)).keys() == {"image", "label"}


def test_the_error_comes_through_the_loader() -> None:
    loader = data.TrainLoader(make(with_bad(at2=BAD["text"][0])), 4, seed=0)
    with pytest.raises(UserError, match="picture 2 is bad: it is not an image; JPEG"):
        for _ in range(2):
            next(loader)


def test_nothing_but_bad_records() -> None:
    source = make([Record(b"", 0)] * 5, on_bad_record="skip")
    with pytest.raises(UserError, match="own: 100 records in a row are bad, the last is picture"):
        source.gather(np.array([1]))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"size": 7}, "config.data.options.size must lie in 8..16384, found 7"),
        ({"central_fraction": 1.1}, "options.central_fraction must lie in 0..1, found 1.1"),
        ({"max_megapixels": 0.0}, "options.max_megapixels must be a number above 0, found 0.0"),
        (
            {"max_megapixels": float("nan")},
            "options.max_megapixels must be a number above 0, found n",
        ),
        ({"min_covered": 1.5}, "options.min_covered must lie in 0..1, found 1.5"),
        ({"resize": "cubic"}, "options.resize is 'cubic'; known are 'bilinear', 'bicubic'"),
        ({"min_area": 0.0}, "options.min_area must be more than 0 and at most 1, found 0.0"),
        ({"erasing": -0.5}, "options.erasing must lie in 0..1, found -0.5"),
        ({"threads": -1}, "options.threads must lie in 0..1024, found -1"),
        ({"policy": "augmix"}, "options.policy is 'augmix'; known are '', 'autoaugment', 'randaug"),
        ({"policy_layers": 0}, "options.policy_layers must lie in 1..100, found 0"),
        ({"policy_magnitude": 11.0}, "options.policy_magnitude must lie in 0..10, found 11.0"),
        (
            {"on_bad_record": "ignore"},
            "options.on_bad_record is 'ignore'; known are 'error', 'skip'",
        ),
    ],
)
def test_mistakes(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Options(**options)
