"""Random images for tests, and their encodings."""

import io
import pathlib
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

ROTATED = Image.Exif()  # a tag for a rotation by 90 degrees
ROTATED[0x0112] = 6


def smooth(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Returns a few random colours in a smooth gradient, uint8 (height, width, 3).

    Left and right, top and bottom differ, so that a flip or a shift is detected.
    """
    coarse = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def encode(pixels: np.ndarray, kind: str = "rgb", **options: Any) -> bytes:
    """Encodes pixels as a JPEG of quality 90 (RGB, grey or CMYK), or as PNG, WebP or BMP."""
    image = Image.fromarray(pixels)
    if kind in ("png", "webp", "bmp"):
        return _save(image, kind.upper(), options)
    image = image.convert({"rgb": "RGB", "grey": "L", "cmyk": "CMYK"}[kind])
    return _save(image, "JPEG", {"quality": 90} | options)


def write(
    root: pathlib.Path, *names: str, height: int = 40, width: int = 60, kind: str = "rgb"
) -> pathlib.Path:
    """Writes one image to each of the paths below a folder; returns the folder."""
    content = encode(smooth(height, width), kind)
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def decode(content: bytes) -> np.ndarray:
    """Decodes a full image with Pillow, uint8 (height, width, 3)."""
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))


def bilinear(pixels: np.ndarray, size: int) -> np.ndarray:
    """Resizes bilinearly, by pixel centres, to float64 (size, size, 3)."""

    def along(values: np.ndarray) -> np.ndarray:
        length = len(values)
        at = np.clip((np.arange(size) + 0.5) * length / size - 0.5, 0, length - 1)
        low = np.minimum(at.astype(int), length - 2) if length > 1 else np.zeros(size, int)
        share = (at - low)[:, None, None]
        return values[low] * (1 - share) + values[np.minimum(low + 1, length - 1)] * share

    rows = along(pixels.astype(np.float64))
    return along(rows.transpose(1, 0, 2)).transpose(1, 0, 2)


def bicubic(pixels: np.ndarray, size: int) -> np.ndarray:
    """Resizes as TensorFlow 1 does, to float64 (size, size, 3): Keys' cubic kernel with a = -0.75.

    Result pixel i is at i * length / size; beyond an edge of the image, the edge pixels are repeated.
    """

    def weight(distance: np.ndarray) -> np.ndarray:
        near = 1.25 * distance**3 - 2.25 * distance**2 + 1
        far = -0.75 * distance**3 + 3.75 * distance**2 - 6 * distance + 3
        return np.where(distance < 1, near, far)

    def along(values: np.ndarray) -> np.ndarray:
        at = np.arange(size) * len(values) / size
        neighbours = np.floor(at).astype(int)[:, None] + np.arange(-1, 3)
        taken = values[neighbours.clip(0, len(values) - 1)]
        return (weight(np.abs(at[:, None] - neighbours))[:, :, None, None] * taken).sum(1)

    rows = along(pixels.astype(np.float64))
    return along(rows.transpose(1, 0, 2)).transpose(1, 0, 2)


def png_of_16_bits(values: np.ndarray) -> bytes:
    """Encodes uint16 (height, width, 1 to 3) as PNG: grey, grey and alpha, or colour."""
    height, width, channels = values.shape
    colour = {1: 0, 2: 4, 3: 2}[channels]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(name, data)
        for name, data in (
            (b"IHDR", struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)),
            (b"IDAT", zlib.compress(rows)),
            (b"IEND", b""),
        )
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def claiming(kind: str, height: int, width: int) -> bytes:
    """Returns a small file whose header claims an image of this size."""
    content = bytearray(encode(smooth(16, 24), kind))
    if kind == "png":
        header = content[16:29]
        header[:8] = struct.pack(">II", width, height)
        content[8:33] = _chunk(b"IHDR", bytes(header))
    else:
        at = content.index(b"\xff\xc0") + 5
        content[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(content)


def _save(image: Image.Image, format: str, options: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()
