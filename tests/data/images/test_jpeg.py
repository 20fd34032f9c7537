"""Decoding a part equals decoding all of it and cutting, and what is damaged is told."""

import io
import tracemalloc

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageFile

from lamb_tpu.data.images import jpeg
from lamb_tpu.data.images.crops import Box
from lamb_tpu.data.images.jpeg import BadImage, decode_crop, decode_whole, picture_size
from tests.data.images.pictures import (
    bicubic,
    bilinear,
    claiming,
    decode,
    encode,
    png_of_16_bits,
    smooth,
)
from tests.shared import shared

CODINGS = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"subsampling": 2, "progressive": True},
    "with restarts": {"subsampling": 2, "restart_marker_blocks": 3},
}


def apart(found: np.ndarray, expected: np.ndarray) -> int:
    assert found.shape == expected.shape
    return int(np.abs(found.astype(int) - expected.astype(int)).max())


def part(content: bytes, box: Box, size: int) -> np.ndarray:
    image, _ = decode_crop(content, lambda height, width: box, size)
    assert image.shape == (size, size, 3) and image.dtype == np.uint8
    return image


def cut(pixels: np.ndarray, box: Box) -> np.ndarray:
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


@pytest.mark.parametrize("kind", ["rgb", "grey"])
@pytest.mark.parametrize("coding", CODINGS)
def test_rows_below_the_crop_change_nothing(coding: str, kind: str) -> None:
    noise = np.random.default_rng(1).integers(-40, 41, (187, 251, 3))
    pixels = np.clip(smooth(187, 251) + noise, 0, 255).astype(np.uint8)
    content = encode(pixels, kind, **CODINGS[coding])
    whole = decode(content)
    for bottom in (40, 47, 48, 49, 64, 95, 96, 97, 160, 176, 187):
        for size in (16, 40):
            box = Box(bottom - size, 251 - size - bottom % 3, size, size)
            assert apart(part(content, box, size), cut(whole, box)) <= 1


def test_height_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = [], simplejpeg.decode_jpeg

    def spy(content: bytes, *arguments: object, **named: object) -> np.ndarray:
        asked.append((simplejpeg.decode_jpeg_header(content)[:2], named["min_height"]))
        return real(content, *arguments, **named)

    monkeypatch.setattr(jpeg.simplejpeg, "decode_jpeg", spy)
    content = encode(smooth(400, 600))
    part(content, Box(10, 0, 90, 90), 90)
    part(content, Box(0, 0, 200, 200), 90)
    part(content, Box(0, 0, 361, 361), 90)
    part(content, Box(300, 0, 90, 90), 90)
    part(encode(smooth(400, 600), subsampling=0), Box(10, 0, 90, 90), 90)
    assert asked == [
        ((112, 600), 112),
        ((208, 600), 104),
        ((368, 600), 92),
        ((400, 600), 400),
        ((104, 600), 104),
    ]


@pytest.mark.parametrize("height, width", [(60, 90), (33, 33), (97, 65), (65, 130)])
def test_resized_as_by_the_formula(height: int, width: int) -> None:
    content = encode(smooth(150, 200))
    box = Box(20, 30, height, width)
    expected = bilinear(cut(decode(content), box), 65)
    # OpenCV computes with weights of 11 bits.
    assert np.abs(part(content, box, 65) - expected).max() < 1.6


@pytest.mark.parametrize("kind", ["rgb", "cmyk", "png"])
@pytest.mark.parametrize("height, width", [(60, 90), (33, 33), (97, 65), (130, 195), (140, 150)])
def test_bicubic_as_by_the_formula_of_tensorflow_1(height: int, width: int, kind: str) -> None:
    noise = np.random.default_rng(1).integers(-40, 41, (150, 200, 3))
    pixels = np.clip(smooth(150, 200) + noise, 0, 255).astype(np.uint8)
    content, box = encode(pixels, kind), Box(7, 3, height, width)
    image, _ = decode_crop(content, lambda height, width: box, 65, resize="bicubic")
    # Also where the box is twice the size: nothing is averaged before.
    expected = np.clip(np.rint(bicubic(cut(decode(content), box), 65)), 0, 255)
    # OpenCV rounds places to a 32nd of a pixel; the decoder is that of libjpeg, as Pillow's.
    assert apart(image, expected) <= 2
    assert np.abs(image - expected).mean() < 0.15
    assert np.abs(part(content, box, 65) - expected).mean() > 1


# TensorFlow 2.21, tf.compat.v1.image.resize_bicubic of the picture below to 7 by 7, red.
TENSORFLOW = np.array(
    [
        [95.00, 168.19, 111.63, 260.70, 73.23, 161.31, 31.15],
        [48.28, 106.27, 112.16, 231.83, 6.65, 185.80, 118.41],
        [59.22, 103.73, 222.36, 117.06, 248.85, 97.24, 137.54],
        [212.60, 95.81, 94.31, 35.03, 204.51, 228.57, 112.30],
        [38.83, 190.13, 39.06, 152.86, 182.19, 169.45, 135.65],
        [49.91, 161.91, 48.47, 217.48, 150.60, 79.70, 170.79],
        [215.83, 76.62, 192.94, 73.17, 1.54, 99.61, 98.29],
    ]
)


def test_bicubic_is_tensorflows() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (11, 9, 3), np.uint8)
    whole = Box(0, 0, 11, 9)
    found, _ = decode_crop(encode(pixels, "png"), lambda height, width: whole, 7, resize="bicubic")
    assert np.abs(found[..., 0] - np.clip(TENSORFLOW, 0, 255)).max() < 2
    assert np.abs(bicubic(pixels, 7)[..., 0] - TENSORFLOW).max() < 0.2


@pytest.mark.parametrize("times", [2, 3, 5, 9])
def test_reduced_scale_is_close_to_averaging_all_pixels(times: int) -> None:
    size, shrink = 32, {2: 2, 3: 2, 5: 4, 9: 8}[times]
    side = times * size + 5
    content = encode(smooth(side + 60, side + 90), subsampling=2)
    # Edges are rounded outwards to whole pixels of the scale.
    top, left = 17, 26
    edges = [at // shrink * shrink for at in (left, top)]
    edges += [-(-at // shrink) * shrink for at in (left + side, top + side)]
    whole = Image.fromarray(decode(content)).crop(edges)
    expected = np.asarray(whole.resize((size, size), Image.Resampling.BILINEAR)).astype(int)
    found = part(content, Box(top, left, side, side), size)
    difference = np.abs(found - expected)
    assert difference.mean() < 2 and difference.max() < 12
    assert np.abs(found[:, ::-1] - expected).mean() > 20


def test_other_kinds_are_converted() -> None:
    pixels = smooth(50, 70)
    box = Box(3, 5, 40, 40)
    for kind in ("grey", "cmyk", "png", "webp", "bmp"):
        content = encode(pixels, kind)
        image, found = decode_crop(content, lambda height, width: box, 40)
        assert found == kind and apart(image, cut(decode(content), box)) == 0
        whole, found = decode_whole(content)
        assert found == kind and apart(whole, decode(content)) == 0
        assert picture_size(content) == (50, 70)
    assert decode_crop(encode(pixels), lambda height, width: box, 40)[1] == "rgb"


@pytest.mark.parametrize("colour", [(250, 10, 20), (10, 240, 30), (5, 20, 245), (200, 200, 30)])
def test_colours_keep_their_places(colour: tuple[int, int, int]) -> None:
    for kind in ("rgb", "cmyk", "png", "webp", "bmp"):
        content = encode(np.full((40, 40, 3), colour, np.uint8), kind)
        image, _ = decode_crop(content, lambda height, width: Box(0, 0, 16, 16), 16)
        # WebP has a quarter of the colours' rows, and video's range of values.
        assert np.abs(image.astype(int) - colour).max() <= (8 if kind == "webp" else 4), kind


def test_alpha_and_palette_are_dropped() -> None:
    pixels = smooth(20, 20)
    alpha = np.dstack([pixels, np.full((20, 20), 7, np.uint8)])
    assert apart(decode_whole(encode(alpha, "png"))[0], pixels) == 0
    buffer = io.BytesIO()
    Image.fromarray(pixels).quantize(256).save(buffer, "PNG")
    assert apart(decode_whole(buffer.getvalue())[0], decode(buffer.getvalue())) == 0


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA"])
def test_modes_of_bitmaps_and_webp(mode: str) -> None:
    image = Image.fromarray(smooth(20, 25)).convert(mode)
    for format, options in (("BMP", {}), ("WEBP", {"lossless": True})):
        buffer = io.BytesIO()
        (image if format == "BMP" else image.convert("RGBA")).save(buffer, format, **options)
        assert apart(decode_whole(buffer.getvalue())[0], np.asarray(image.convert("RGB"))) == 0


@pytest.mark.parametrize("format", ["WEBP", "PNG"])
def test_the_first_image_of_an_animation(format: str) -> None:
    first, second = smooth(20, 30, 1), smooth(20, 30, 2)
    buffer = io.BytesIO()
    Image.fromarray(first).save(
        buffer,
        format,
        save_all=True,
        append_images=[Image.fromarray(second)],
        **({"lossless": True} if format == "WEBP" else {}),
    )
    found, kind = decode_whole(buffer.getvalue())
    assert kind == "animated" and apart(found, first) == 0


def test_damaged_webp_and_bitmaps_are_bad_images() -> None:
    """No error of Pillow's escapes, and what decodes has the size of its header."""
    rng = np.random.default_rng(0)
    for kind in ("webp", "bmp"):
        whole = encode(smooth(24, 31), kind)
        cut_short = [whole[: int(len(whole) * share)] for share in (0.3, 0.6, 0.9)]
        for content in cut_short:
            with pytest.raises(BadImage):
                decode_whole(content)
        for _ in range(300):
            damaged = bytearray(whole)
            for at in rng.integers(0, min(len(whole), 120), rng.integers(1, 5)):
                damaged[at] = int(rng.integers(256))
            try:
                decode_whole(bytes(damaged), 10_000)
            except BadImage as bad:
                assert str(bad)


def test_orientation_is_not_followed_and_what_stands_behind_is_passed_over() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by a quarter
    content = encode(smooth(40, 60), exif=exif)
    assert decode_whole(content)[0].shape == (40, 60, 3)
    box = Box(0, 0, 16, 16)
    behind = part(content + b"\0" * 99, box, 16)
    np.testing.assert_array_equal(behind, part(content, box, 16))


@pytest.mark.parametrize("kind", ["grey", "grey and alpha", "colour"])
def test_of_16_bits_the_upper_eight_are_kept(kind: str) -> None:
    """The rule of TensorFlow's decode_png, for each kind alike; Pillow clips the grey ones."""
    channels = {"grey": 1, "grey and alpha": 2, "colour": 3}[kind]
    values = np.random.default_rng(0).integers(0, 2**16, (40, 50, channels), np.uint16)
    values[0, :3, 0] = 0, 255, 65_535
    content = png_of_16_bits(values)
    expected = (values >> 8).astype(np.uint8)[..., : 1 if channels < 3 else 3]
    whole, found = decode_whole(content)
    assert found == "png" and whole.shape == (40, 50, 3) and whole.dtype == np.uint8
    np.testing.assert_array_equal(whole, np.broadcast_to(expected, whole.shape))
    np.testing.assert_array_equal(part(content, Box(3, 4, 32, 32), 32), whole[3:35, 4:36])


@pytest.mark.parametrize("kind", ["rgb", "grey", "cmyk", "png"])
def test_too_many_pixels_are_refused_before_memory_is_taken(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = claiming(kind, 65_500, 65_400)
    assert len(content) < 2000

    def decoder(*arguments: object, **named: object) -> None:
        raise AssertionError("nothing may be decoded")

    monkeypatch.setattr(jpeg.simplejpeg, "decode_jpeg", decoder)
    monkeypatch.setattr(ImageFile.ImageFile, "load", decoder)
    box = Box(0, 0, 16, 16)  # of the first rows alone, which would be cheap
    for attempt in (lambda: part(content, box, 16), lambda: decode_whole(content)):
        tracemalloc.start()
        with pytest.raises(BadImage, match="claims 65,500 x 65,400 pixels, more than the 100 mill"):
            attempt()
        assert tracemalloc.get_traced_memory()[1] < 1e6
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["rgb", "cmyk", "png", "webp", "bmp"])
def test_limit_of_pixels(kind: str) -> None:
    content = encode(smooth(16, 24), kind)

    def whole(height: int, width: int) -> Box:
        return Box(0, 0, 16, 16)

    assert decode_crop(content, whole, 16, 384)[1] == kind == decode_whole(content, 384)[1]
    for attempt in (
        lambda: decode_crop(content, whole, 16, 383),
        lambda: decode_whole(content, 383),
    ):
        with pytest.raises(BadImage, match="16 x 24 pixels, more than the 0.000383 million"):
            attempt()


def test_limit_above_pillows_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    content = encode(smooth(16, 24), "png")
    assert decode_whole(content)[0].shape == (16, 24, 3)


def with_thumbnail(pixels: np.ndarray) -> bytes:
    """A JPEG that holds another one, with an end of its own, in its header."""
    inner = b"Exif\0\0" + encode(smooth(16, 16))
    segment = b"\xff\xe1" + (len(inner) + 2).to_bytes(2, "big") + inner
    content = encode(pixels)
    return content[:2] + segment + content[2:]


PIXELS = np.clip(
    smooth(90, 120) + np.random.default_rng(0).integers(-60, 61, (90, 120, 3)), 0, 255
).astype(np.uint8)
JPEG, PNG, CMYK = encode(PIXELS), encode(PIXELS, "png"), encode(PIXELS, "cmyk")


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "the file is empty"),
        (b"not a picture at all", "it is not an image; JPEG, PNG, WebP and BMP are read"),
        (JPEG[:1], "it is not an image; JPEG, PNG, WebP and BMP are read"),
        (JPEG[:2], "begins as a JPEG and has no complete header"),
        (JPEG[:100], "begins as a JPEG and has no complete header"),
        (JPEG[: len(JPEG) * 3 // 4], "ends before its end marker"),
        (JPEG[:-2], "ends before its end marker"),
        (with_thumbnail(PIXELS)[:-2], "ends before its end marker"),
        (JPEG[: len(JPEG) // 3] + b"\xff\xd9", "Corrupt JPEG data: premature end|Premature end"),
        (JPEG.replace(b"\x00\x5a\x00\x78", b"\0\0\0\0", 1), "its header tells no size"),
        (PNG[: len(PNG) // 2], "."),
        (encode(PIXELS, "webp")[:-100], "."),
        (encode(PIXELS, "bmp")[:-100], "truncated"),
        (CMYK[: len(CMYK) // 2], "ends before its end marker"),
        (b"GIF89a" + bytes(50), "its format is GIF; JPEG, PNG, WebP and BMP are read"),
    ],
)
def test_bad_content(content: bytes, reason: str) -> None:
    box = Box(20, 20, 70, 70)  # to the last row, so that all of the picture is decoded
    for attempt in (lambda: part(content, box, 32), lambda: decode_whole(content)):
        with pytest.raises(BadImage, match=reason):
            attempt()


@pytest.mark.parametrize("share", [0.3, 0.4, 0.6, 0.8])
def test_damage_shows_where_all_is_decoded(share: float) -> None:
    at = int(share * len(JPEG))
    content = JPEG[:at] + bytes(range(100, 200)) + JPEG[at + 100 :]
    with pytest.raises(BadImage, match="Corrupt JPEG data"):
        decode_whole(content)
    # Above the damage the picture is whole.
    box = Box(0, 0, 16, 16)
    np.testing.assert_array_equal(part(content, box, 16), part(JPEG, box, 16))


def test_bytes_left_over_are_let_pass() -> None:
    content = JPEG[:-2] + bytes(range(1, 31)) + JPEG[-2:]
    box = Box(26, 20, 64, 64)
    np.testing.assert_array_equal(part(content, box, 32), part(JPEG, box, 32))
    with pytest.raises(BadImage, match=" extraneous bytes"):
        decode_whole(content)


def test_a_header_within_the_header_is_no_header() -> None:
    content = with_thumbnail(PIXELS)
    np.testing.assert_array_equal(decode_whole(content)[0], decode(JPEG))


def test_pictures_keep_their_memory() -> None:
    box = Box(0, 0, 90, 90)
    other = encode(255 - PIXELS)
    ways = (lambda content: part(content, box, 90), lambda content: decode_whole(content)[0])
    for decoded in ways:
        first = decoded(JPEG)
        before = first.copy()
        assert (decoded(other) != before).any()
        np.testing.assert_array_equal(first, before)


def test_photographs() -> None:
    rng = np.random.default_rng(0)
    paths = sorted(shared("data", "imagenet_sample").glob("*.JPEG"))[::40]
    assert len(paths) == 10
    for path in paths:
        content = path.read_bytes()
        whole = decode(content)
        side = min(whole.shape[:2]) // 2
        top, left = (int(rng.integers(0, extent - side)) for extent in whole.shape[:2])
        box = Box(top, left, side, side)
        assert apart(part(content, box, side), cut(whole, box)) <= 1
