"""Formats, sizes and rotation tags, read from the first bytes of files that Pillow wrote."""

import io
import struct
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lamb_tpu.data.images.headers import NUM_BYTES, header_size, image_format, is_rotated
from tests.data.images.photographs import smooth

PIXELS = smooth(30, 47)


def save(format: str, orientation: int | None = None, mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    if orientation is not None:
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = orientation
    Image.fromarray(PIXELS).convert(mode).save(buffer, format, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "format", ["JPEG", "PNG", "WebP", "BMP", "GIF", "TIFF", "AVIF", "JPEG 2000", "PNM"]
)
def test_formats(format: str) -> None:
    try:
        content = save("PPM" if format == "PNM" else format.upper().replace(" ", ""))
    except (KeyError, OSError):
        pytest.skip(f"this Pillow writes no {format}")
    assert image_format(content[:NUM_BYTES]) == format


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"B",
        b"BM is no bitmap, but text",
        b"RIFF\0\0\0\0WAVEfmt ",
        b"\x89PNG",
        b"hello, world!!!!",
        b"file\tlabel\na\t1\n",
    ],
)
def test_other_content(head: bytes) -> None:
    assert image_format(head) == ""


@pytest.mark.parametrize(
    "content",
    [
        save("PNG"),
        save("BMP"),
        save("BMP", mode="1"),
        save("WEBP"),
        save("WEBP", lossless=True),
        save("WEBP", 6),
        save("WEBP", mode="RGBA", lossless=True),
        # An OS/2 bitmap, and a bitmap whose rows begin at the top.
        b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 47, 30, 1, 24),
        b"BM" + bytes(12) + struct.pack("<Iii", 40, 47, -30),
    ],
)
def test_sizes(content: bytes) -> None:
    assert header_size(content) == (30, 47)
    assert header_size(content[:18]) is None


@pytest.mark.parametrize(
    "content",
    [
        save("BMP")[:18] + struct.pack("<ii", 0, 9),
        save("BMP")[:18] + struct.pack("<ii", -5, 9),
        save("GIF"),
        b"RIFF\0\0\0\0WEBPVP9 " + bytes(20),
    ],
)
def test_headers_without_a_size(content: bytes) -> None:
    assert header_size(content) is None


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_rotation_tags(format: str) -> None:
    actual = {tag: is_rotated(save(format, tag)) for tag in (None, 0, 1, 2, 3, 6, 8, 9)}
    assert actual == {None: False, 0: False, 1: False, 2: True, 3: True, 6: True, 8: True, 9: False}


@pytest.mark.filterwarnings("ignore")  # Pillow's warnings; the module ignores them outside pytest
def test_rotation_tag_after_another_segment_or_damaged() -> None:
    content = save("JPEG", 6)
    comment = b"\xff\xfe" + struct.pack(">H", 2 + 500) + bytes(500)
    assert is_rotated(content[:2] + comment + content[2:])
    at = content.index(b"Exif\0\0") + 6
    for stop in range(at, at + 30):
        is_rotated(content[:stop])  # must not raise an error
    rng = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(content)
        damaged[int(rng.integers(2, 60))] = int(rng.integers(256))
        is_rotated(bytes(damaged))
