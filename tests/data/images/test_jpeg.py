"""Decoding a box equals decoding the full image and cutting out the box; damage is reported."""

import io
import math
import pathlib
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageFile

from lamb_tpu.data.images import jpeg
from lamb_tpu.data.images.crops import Box
from lamb_tpu.data.images.jpeg import BadImage, decode_crop, decode_full, image_size
from tests.data.images.photographs import (
    ROTATED,
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


def apart(actual: np.ndarray, expected: np.ndarray) -> int:
    assert actual.shape == expected.shape
    return int(np.abs(actual.astype(int) - expected.astype(int)).max())


def decode_box(content: bytes, box: Box, size: int) -> np.ndarray:
    image, _ = decode_crop(content, lambda height, width: box, size)
    assert image.shape == (size, size, 3) and image.dtype == np.uint8
    return image


def check_bad(content: bytes, reason: str, box: Box, size: int) -> None:
    """Expects a BadImage when a box is decoded, and when the full image is decoded."""
    for attempt in (lambda: decode_box(content, box, size), lambda: decode_full(content)):
        with pytest.raises(BadImage, match=reason):
            attempt()


def cut(pixels: np.ndarray, box: Box) -> np.ndarray:
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


@pytest.mark.parametrize("kind", ["rgb", "grey"])
@pytest.mark.parametrize("coding", CODINGS)
def test_rows_below_the_crop_change_nothing(coding: str, kind: str) -> None:
    noise = np.random.default_rng(1).integers(-40, 41, (187, 251, 3))
    pixels = np.clip(smooth(187, 251) + noise, 0, 255).astype(np.uint8)
    content = encode(pixels, kind, **CODINGS[coding])
    entire = decode(content)
    for bottom in (40, 47, 48, 49, 64, 95, 96, 97, 160, 176, 187):
        for size in (16, 40):
            box = Box(bottom - size, 251 - size - bottom % 3, size, size)
            assert apart(decode_box(content, box, size), cut(entire, box)) <= 1


def test_height_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = [], simplejpeg.decode_jpeg

    def spy(content: bytes, *arguments: object, **named: object) -> np.ndarray:
        asked.append((simplejpeg.decode_jpeg_header(content)[:2], named["min_height"]))
        return real(content, *arguments, **named)

    monkeypatch.setattr(jpeg.simplejpeg, "decode_jpeg", spy)
    content = encode(smooth(400, 600))
    decode_box(content, Box(10, 0, 90, 90), 90)
    decode_box(content, Box(0, 0, 200, 200), 90)
    decode_box(content, Box(0, 0, 361, 361), 90)
    decode_box(content, Box(300, 0, 90, 90), 90)
    decode_box(encode(smooth(400, 600), subsampling=0), Box(10, 0, 90, 90), 90)
    heights = [(112, 112), (208, 104), (368, 92), (400, 400), (104, 104)]
    assert asked == [((height, 600), least) for height, least in heights]


@pytest.mark.parametrize("height, width", [(60, 90), (33, 33), (97, 65), (65, 130)])
def test_resized_as_by_the_formula(height: int, width: int) -> None:
    content = encode(smooth(150, 200))
    box = Box(20, 30, height, width)
    expected = bilinear(cut(decode(content), box), 65)
    # OpenCV's weights have 11 bits.
    assert np.abs(decode_box(content, box, 65) - expected).max() < 1.6


@pytest.mark.parametrize("kind", ["rgb", "cmyk", "png"])
@pytest.mark.parametrize("height, width", [(60, 90), (33, 33), (97, 65), (130, 195), (140, 150)])
def test_bicubic_as_by_the_formula_of_tensorflow_1(height: int, width: int, kind: str) -> None:
    noise = np.random.default_rng(1).integers(-40, 41, (150, 200, 3))
    pixels = np.clip(smooth(150, 200) + noise, 0, 255).astype(np.uint8)
    content, box = encode(pixels, kind), Box(7, 3, height, width)
    image, _ = decode_crop(content, lambda height, width: box, 65, resize="bicubic")
    # This also holds for a box of at least twice the size: the cubic method does not average.
    expected = np.clip(np.rint(bicubic(cut(decode(content), box), 65)), 0, 255)
    # OpenCV rounds positions to 1/32 pixel; the decoder is libjpeg, as in Pillow.
    assert apart(image, expected) <= 2
    assert np.abs(image - expected).mean() < 0.15
    assert np.abs(decode_box(content, box, 65) - expected).mean() > 1


# Result of TensorFlow 2.21's tf.compat.v1.image.resize_bicubic for the image below, resized to 7 by 7;
# red channel.
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
    entire = Box(0, 0, 11, 9)
    actual, _ = decode_crop(
        encode(pixels, "png"), lambda height, width: entire, 7, resize="bicubic"
    )
    assert np.abs(actual[..., 0] - np.clip(TENSORFLOW, 0, 255)).max() < 2
    assert np.abs(bicubic(pixels, 7)[..., 0] - TENSORFLOW).max() < 0.2


@pytest.mark.parametrize("times", [2, 3, 5, 9])
def test_reduced_scale_is_close_to_averaging_all_pixels(times: int) -> None:
    size, shrink = 32, {2: 2, 3: 2, 5: 4, 9: 8}[times]
    side = times * size + 5
    content = encode(smooth(side + 60, side + 90), subsampling=2)
    # Edges are rounded outwards to whole pixels of the smaller scale.
    top, left = 17, 26
    edges = [at // shrink * shrink for at in (left, top)]
    edges += [-(-at // shrink) * shrink for at in (left + side, top + side)]
    entire = Image.fromarray(decode(content)).crop(edges)
    expected = np.asarray(entire.resize((size, size), Image.Resampling.BILINEAR)).astype(int)
    actual = decode_box(content, Box(top, left, side, side), size)
    difference = np.abs(actual - expected)
    assert difference.mean() < 2 and difference.max() < 12
    assert np.abs(actual[:, ::-1] - expected).mean() > 20


def test_other_kinds_are_converted() -> None:
    pixels = smooth(50, 70)
    box = Box(3, 5, 40, 40)
    for kind in ("grey", "cmyk", "png", "webp", "bmp"):
        content = encode(pixels, kind)
        image, actual = decode_crop(content, lambda height, width: box, 40)
        assert actual == kind and apart(image, cut(decode(content), box)) == 0
        entire, actual = decode_full(content)
        assert actual == kind and apart(entire, decode(content)) == 0
        assert image_size(content) == (50, 70)
    assert decode_crop(encode(pixels), lambda height, width: box, 40)[1] == "rgb"


@pytest.mark.parametrize("colour", [(250, 10, 20), (10, 240, 30), (5, 20, 245), (200, 200, 30)])
def test_channels_keep_their_order(colour: tuple[int, int, int]) -> None:
    for kind in ("rgb", "cmyk", "png", "webp", "bmp"):
        content = encode(np.full((40, 40, 3), colour, np.uint8), kind)
        image, _ = decode_crop(content, lambda height, width: Box(0, 0, 16, 16), 16)
        # WebP stores a quarter of the chroma samples, in the limited range of video.
        assert np.abs(image.astype(int) - colour).max() <= (8 if kind == "webp" else 4), kind


def test_alpha_and_palette_are_dropped() -> None:
    pixels = smooth(20, 20)
    alpha = np.dstack([pixels, np.full((20, 20), 7, np.uint8)])
    assert apart(decode_full(encode(alpha, "png"))[0], pixels) == 0
    buffer = io.BytesIO()
    Image.fromarray(pixels).quantize(256).save(buffer, "PNG")
    assert apart(decode_full(buffer.getvalue())[0], decode(buffer.getvalue())) == 0


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA"])
def test_modes_of_bitmaps_and_webp(mode: str) -> None:
    image = Image.fromarray(smooth(20, 25)).convert(mode)
    for format, options in (("BMP", {}), ("WEBP", {"lossless": True})):
        buffer = io.BytesIO()
        (image if format == "BMP" else image.convert("RGBA")).save(buffer, format, **options)
        assert apart(decode_full(buffer.getvalue())[0], np.asarray(image.convert("RGB"))) == 0


@pytest.mark.parametrize("format", ["WEBP", "PNG"])
def test_the_first_image_of_an_animation(format: str) -> None:
    first, second = smooth(20, 30, 1), smooth(20, 30, 2)
    buffer = io.BytesIO()
    options = {"lossless": True} if format == "WEBP" else {}
    others = [Image.fromarray(second)]
    Image.fromarray(first).save(buffer, format, save_all=True, append_images=others, **options)
    actual, kind = decode_full(buffer.getvalue())
    assert kind == "animated" and apart(actual, first) == 0


def test_damaged_webp_and_bitmaps_are_bad_images() -> None:
    """Truncated files raise BadImage; other damage raises BadImage with a reason, or is not noticed."""
    rng = np.random.default_rng(0)
    for kind in ("webp", "bmp"):
        entire = encode(smooth(24, 31), kind)
        cut_short = [entire[: int(len(entire) * share)] for share in (0.3, 0.6, 0.9)]
        for content in cut_short:
            with pytest.raises(BadImage):
                decode_full(content)
        for _ in range(300):
            damaged = bytearray(entire)
            for at in rng.integers(0, min(len(entire), 120), rng.integers(1, 5)):
                damaged[at] = int(rng.integers(256))
            try:
                decode_full(bytes(damaged), 10_000)
            except BadImage as bad:
                assert str(bad)


def test_orientation_and_trailing_data_are_ignored() -> None:
    content = encode(smooth(40, 60), exif=ROTATED)
    assert decode_full(content)[0].shape == (40, 60, 3)
    box = Box(0, 0, 16, 16)
    trailing = decode_box(content + b"\0" * 99, box, 16)
    np.testing.assert_array_equal(trailing, decode_box(content, box, 16))


@pytest.mark.parametrize("kind", ["grey", "grey and alpha", "colour"])
def test_upper_eight_of_16_bits_are_used(kind: str) -> None:
    """PNGs of 16 bits are decoded as by TensorFlow's decode_png; Pillow would clip grey images."""
    channels = {"grey": 1, "grey and alpha": 2, "colour": 3}[kind]
    values = np.random.default_rng(0).integers(0, 2**16, (40, 50, channels), np.uint16)
    values[0, :3, 0] = 0, 255, 65_535
    content = png_of_16_bits(values)
    expected = (values >> 8).astype(np.uint8)[..., : 1 if channels < 3 else 3]
    entire, actual = decode_full(content)
    assert actual == "png" and entire.shape == (40, 50, 3) and entire.dtype == np.uint8
    np.testing.assert_array_equal(entire, np.broadcast_to(expected, entire.shape))
    np.testing.assert_array_equal(decode_box(content, Box(3, 4, 32, 32), 32), entire[3:35, 4:36])


@pytest.mark.parametrize("kind", ["rgb", "grey", "cmyk", "png"])
def test_too_many_pixels_are_rejected_early(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = claiming(kind, 65_500, 65_400)
    assert len(content) < 2000

    def decoder(*arguments: object, **named: object) -> None:
        raise AssertionError("the image must not be decoded")

    monkeypatch.setattr(jpeg.simplejpeg, "decode_jpeg", decoder)
    monkeypatch.setattr(ImageFile.ImageFile, "load", decoder)
    tracemalloc.start()
    # The box has only the first rows, which would be cheap to decode.
    reason = "claims 65,500 x 65,400 pixels, whose decoding t"
    check_bad(content, reason, Box(0, 0, 16, 16), 16)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


# Peak memory for each pixel during decoding, in bytes.
BYTES = {"rgb": 6, "cmyk": 7, "png": 7, "webp": 16, "bmp": 7}


@pytest.mark.parametrize("kind", BYTES)
def test_limit_of_pixels(kind: str) -> None:
    content = encode(smooth(16, 24), kind)

    def entire(height: int, width: int) -> Box:
        return Box(0, 0, 16, 16)

    # The limit is on memory: an ordinary JPEG takes 6 bytes for each pixel.
    most = math.ceil(16 * 24 * BYTES[kind] / 6)
    assert decode_crop(content, entire, 16, most)[1] == kind == decode_full(content, most)[1]
    for attempt in (
        lambda: decode_crop(content, entire, 16, most - 1),
        lambda: decode_full(content, most - 1),
    ):
        with pytest.raises(BadImage, match=rf"16 x 24 pixels, .* \({BYTES[kind]} bytes per pixel"):
            attempt()


_MEASURE = """
import os, sys
from tests.data.images.test_jpeg import SIDE, large
from lamb_tpu.data.images import jpeg
from lamb_tpu.data.images.crops import Box

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

for name in sys.argv[1:]:
    content = large(name)
    jpeg.decode_full(large(name, 64))  # libraries are loaded, buffers exist
    if not os.fork():  # a child's peak begins at the memory that it has
        before = status("VmRSS")
        # At full scale, with a copy of nearly all of the image.
        jpeg.decode_crop(
            content, lambda height, width: Box(0, 0, height, width - 1), 224, resize="bicubic"
        )
        print(name, (status("VmHWM") - before) / SIDE**2, flush=True)
        os._exit(0)
    os.wait()
"""
SIDE = 2500
# Name -> the bytes for each pixel that the limit assumes.
LARGE = {
    "rgb": 6,
    "progressive": 9,
    "cmyk": 7,
    "progressive cmyk": 12,
    "png": 7,
    "png of 16 bits": 7,
    "webp": 16,
    "bmp": 7,
}


def large(name: str, side: int = SIDE) -> bytes:
    pixels = np.zeros((side, side, 3), np.uint8)
    if name == "png of 16 bits":
        return png_of_16_bits(pixels.astype(np.uint16))
    progressive = {"progressive": True, "subsampling": 0} if name.startswith("progressive") else {}
    return encode(pixels, name.removeprefix("progressive").strip() or "rgb", **progressive)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_per_pixel_is_what_the_limit_assumes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *LARGE],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(__file__).parents[3],
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(LARGE), done.stderr
    for line in lines:
        name, _, used = line.rpartition(" ")
        # A byte for each pixel is 6 MB, more than the part that does not grow with the image.
        assert LARGE[name] - 4 < float(used) < LARGE[name] + 1, line
    with pytest.raises(BadImage) as error:
        decode_full(claiming("png", 9_999, 10_000))
    assert str(error.value) == (
        "it claims 9,999 x 10,000 pixels, whose decoding takes 700 MB (7 bytes per pixel of a PNG), "
        "more than the 600 MB that config.data.options.max_megapixels=100 allows"
    )


def test_too_many_scans_are_rejected() -> None:
    content = encode(smooth(16, 24), progressive=True)
    start = content.rindex(b"\xff\xda")
    bomb = content[:start] + content[start:-2] * 101 + content[-2:]
    check_bad(bomb, r"it has 1\d\d scans, more than 100", Box(0, 0, 16, 16), 16)


def test_the_buffer_of_a_huge_image_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg, "_SCRATCH", threading.local())
    monkeypatch.setattr(jpeg, "_SCRATCH_BYTES", 20 * 30 * 3)
    decode_full(encode(smooth(20, 31)))
    assert not hasattr(jpeg._SCRATCH, "pixels")
    decode_full(encode(smooth(20, 30)))
    assert jpeg._SCRATCH.pixels.size == 20 * 30 * 3


def test_a_palette_with_alpha_gives_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    image = Image.fromarray(smooth(16, 24)).quantize(8)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", transparency=bytes(range(8)))
    pixels, _ = decode_full(buffer.getvalue())
    np.testing.assert_array_equal(pixels, np.asarray(image.convert("RGB")))
    assert not recwarn.list


def test_limit_above_pillows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    content = encode(smooth(16, 24), "png")
    assert decode_full(content)[0].shape == (16, 24, 3)


def with_thumbnail(pixels: np.ndarray) -> bytes:
    """Returns a JPEG whose header contains a second JPEG with an end marker."""
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
        (b"not an image at all", "it is not an image; use JPEG, PNG, WebP or BMP"),
        (JPEG[:1], "it is not an image; use JPEG, PNG, WebP or BMP"),
        (JPEG[:2], "begins like a JPEG but has no complete header"),
        (JPEG[:100], "begins like a JPEG but has no complete header"),
        (JPEG[: len(JPEG) * 3 // 4], "ends before its end marker"),
        (JPEG[:-2], "ends before its end marker"),
        (with_thumbnail(PIXELS)[:-2], "ends before its end marker"),
        (JPEG[: len(JPEG) // 3] + b"\xff\xd9", "Corrupt JPEG data: premature end|Premature end"),
        (JPEG.replace(b"\x00\x5a\x00\x78", b"\0\0\0\0", 1), "a height or width of 0"),
        (PNG[: len(PNG) // 2], "."),
        (encode(PIXELS, "webp")[:-100], "."),
        (encode(PIXELS, "bmp")[:-100], "truncated"),
        (CMYK[: len(CMYK) // 2], "ends before its end marker"),
        (b"GIF89a" + bytes(50), "its format is GIF; use JPEG, PNG, WebP or BMP"),
    ],
)
def test_bad_content(content: bytes, reason: str) -> None:
    # The box ends at the last row, so that the full image is decoded.
    check_bad(content, reason, Box(20, 20, 70, 70), 32)


@pytest.mark.parametrize("share", [0.3, 0.4, 0.6, 0.8])
def test_damage_shows_where_all_is_decoded(share: float) -> None:
    at = int(share * len(JPEG))
    content = JPEG[:at] + bytes(range(100, 200)) + JPEG[at + 100 :]
    with pytest.raises(BadImage, match="Corrupt JPEG data"):
        decode_full(content)
    # A box above the damage is complete.
    box = Box(0, 0, 16, 16)
    np.testing.assert_array_equal(decode_box(content, box, 16), decode_box(JPEG, box, 16))


def test_bytes_left_over_are_let_pass() -> None:
    content = JPEG[:-2] + bytes(range(1, 31)) + JPEG[-2:]
    box = Box(26, 20, 64, 64)
    np.testing.assert_array_equal(decode_box(content, box, 32), decode_box(JPEG, box, 32))
    with pytest.raises(BadImage, match=" extraneous bytes"):
        decode_full(content)


def test_a_header_within_the_header_is_no_header() -> None:
    content = with_thumbnail(PIXELS)
    np.testing.assert_array_equal(decode_full(content)[0], decode(JPEG))


def test_results_do_not_share_memory() -> None:
    box = Box(0, 0, 90, 90)
    other = encode(255 - PIXELS)
    for decoded in (lambda each: decode_box(each, box, 90), lambda each: decode_full(each)[0]):
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
        entire = decode(content)
        side = min(entire.shape[:2]) // 2
        top, left = (int(rng.integers(0, extent - side)) for extent in entire.shape[:2])
        box = Box(top, left, side, side)
        assert apart(decode_box(content, box, side), cut(entire, box)) <= 1
