"""Formats, sizes and rotation tags of images, from the first bytes of their files.

The content decides the format, never the name: a JPEG may be called photo.jfif, and a photo.jpg may
hold a PNG.
"""

import io
import re
import struct
import warnings
from typing import NamedTuple

from PIL import Image, WebPImagePlugin

# Damaged tags are common in photographs. Pillow warns of each, and they count as upright.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.TiffImagePlugin")

# The longest prefix that `image_format` looks at.
NUM_BYTES = 16
FORMATS = ("JPEG", "PNG", "WebP", "BMP")  # that are read
# First bytes -> the format. Formats that are not read are named in messages.
_SIGNATURES = {
    rb"\xff\xd8\xff": "JPEG",
    rb"\x89PNG\r\n\x1a\n": "PNG",
    rb"RIFF....WEBP": "WebP",
    # The four bytes after the file's size are reserved and 0, which text that begins with BM lacks.
    rb"BM....\0\0\0\0": "BMP",
    rb"GIF8[79]a": "GIF",
    rb"II\*\0|MM\0\*|II\+\0|MM\0\+": "TIFF",
    rb"....ftyp(?:heic|heix|hevc|mif1|msf1)": "HEIC",
    rb"....ftypavi[fs]": "AVIF",
    rb"\xff\x0a|\0\0\0\x0cJXL ": "JPEG XL",
    rb"\0\0\0\x0cjP  ": "JPEG 2000",
    rb"8BPS": "Photoshop",
    rb"P[1-6][\s#]": "PNM",
}
_ORIENTATION = 0x0112  # the EXIF tag; 1 is upright
_EXIF = b"Exif\0\0"
_APPLICATION = {bytes([marker]) for marker in (*range(0xE0, 0xF0), 0xFE)}


class Size(NamedTuple):
    """Height and width, in pixels."""

    height: int
    width: int


def image_format(head: bytes) -> str:
    """Returns the format of a file that begins with `head`, also one that is not read; or ''."""
    for pattern, name in _SIGNATURES.items():
        if re.match(pattern, head, re.DOTALL):
            return name
    return ""


def header_size(content: bytes) -> Size | None:
    """Returns the size in the header of a PNG, WebP or BMP; None if the header is incomplete."""
    found = image_format(content[:NUM_BYTES])
    try:
        if found == "PNG":
            # The signature has 8 bytes. The first chunk has its width at byte 16.
            width, height = struct.unpack_from(">II", content, 16)
        elif found == "BMP":
            # OS/2's first header has 16 bits for each; rows from the top have a negative height.
            old = struct.unpack_from("<I", content, 14)[0] == 12
            width, height = struct.unpack_from("<HH" if old else "<ii", content, 18)
        elif found == "WebP":
            width, height = _webp_size(content)
        else:
            return None
    except struct.error:
        return None
    return Size(abs(height), width) if height and width > 0 else None


def _webp_size(content: bytes) -> tuple[int, int]:
    """Returns (width, height) of a lossy, lossless or extended WebP."""
    kind = content[12:16]
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", content, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", content, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8X":
        low = struct.unpack_from("<HBHB", content, 24)
        return low[0] + (low[1] << 16) + 1, low[2] + (low[3] << 16) + 1
    return 0, 0


def is_rotated(content: bytes) -> bool:
    """Returns whether an EXIF tag says that the stored rows are not those of the upright image.

    The tag is not applied. Content that is damaged counts as upright.
    """
    exif = _exif(content)
    if exif is None:
        return False
    found = Image.Exif()
    try:
        found.load(exif)
        return found.get(_ORIENTATION, 1) in range(2, 9)
    except Exception:  # Pillow's parser raises many types of errors for damaged tags
        return False


def _exif(content: bytes) -> bytes | None:
    """Returns the EXIF block of an image, or None."""
    found = image_format(content[:NUM_BYTES])
    if found == "JPEG":
        # Segments of a marker, a length and as many bytes. Those of applications and comments
        # come first.
        at = 2
        while content[at : at + 1] == b"\xff" and content[at + 1 : at + 2] in _APPLICATION:
            stop = at + 2 + int.from_bytes(content[at + 2 : at + 4], "big")
            if content[at + 1] == 0xE1 and content.startswith(_EXIF, at + 4):
                return content[at + 4 : stop]
            at = stop
        return None
    if found == "PNG":
        # Chunks of a length, a name, as many bytes and a checksum.
        at = 8
        while at + 8 <= len(content):
            length = int.from_bytes(content[at : at + 4], "big")
            if content[at + 4 : at + 8] == b"eXIf":
                return content[at + 8 : at + 8 + length]
            at += 12 + length
        return None
    # A bit of the extended header says that the file has EXIF, which is behind the pixels.
    if found == "WebP" and content[12:16] == b"VP8X" and content[20:21] and content[20] & 8:
        try:
            with WebPImagePlugin.WebPImageFile(io.BytesIO(content)) as image:
                return image.info.get("exif")
        except Exception:  # damaged, which decoding reports
            return None
    return None
