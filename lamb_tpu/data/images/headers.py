"""Formats, sizes and rotation tags of images, from the first bytes of their files.

The content decides the format, never the name: photo.jfif may be a JPEG, and photo.jpg may be a
PNG.
"""

import io
import re
import struct
import warnings

from PIL import Image, WebPImagePlugin

# An image with a damaged tag counts as upright. Such tags are common, and Pillow would warn of each.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.TiffImagePlugin")

# Number of bytes that `image_format` needs.
NUM_BYTES = 16
FORMATS = ("JPEG", "PNG", "WebP", "BMP")  # supported formats
# First bytes -> format. Messages name unsupported formats too.
_SIGNATURES = {
    rb"\xff\xd8\xff": "JPEG",
    rb"\x89PNG\r\n\x1a\n": "PNG",
    rb"RIFF....WEBP": "WebP",
    # The four bytes after the file's size are reserved and 0, unlike in a text that begins with BM.
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


def image_format(head: bytes) -> str:
    """Returns the format of a file that begins with `head`, even if unsupported; '' if unknown."""
    for pattern, name in _SIGNATURES.items():
        if re.match(pattern, head, re.DOTALL):
            return name
    return ""


def header_size(content: bytes) -> tuple[int, int] | None:
    """Returns (height, width) in the header of a PNG, WebP or BMP; None if the header is incomplete."""
    format_name = image_format(content[:NUM_BYTES])
    try:
        if format_name == "PNG":
            # The signature has 8 bytes. The width in the first chunk is at byte 16.
            width, height = struct.unpack_from(">II", content, 16)
        elif format_name == "BMP":
            # The header of OS/2 1.x stores each side in 16 bits. A negative height means that the
            # rows begin at the top.
            old = struct.unpack_from("<I", content, 14)[0] == 12
            width, height = struct.unpack_from("<HH" if old else "<ii", content, 18)
        elif format_name == "WebP":
            width, height = _webp_size(content)
        else:
            return None
    except struct.error:
        return None
    return (abs(height), width) if height and width > 0 else None


def _webp_size(content: bytes) -> tuple[int, int]:
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
    """Returns whether an EXIF tag says that the image must be rotated or mirrored to be upright.

    The tag is not applied. Damaged content counts as upright.
    """
    exif = _exif(content)
    if exif is None:
        return False
    tags = Image.Exif()
    try:
        tags.load(exif)
        return tags.get(_ORIENTATION, 1) in range(2, 9)
    except Exception:  # Pillow's parser raises many types of errors for damaged tags
        return False


def _exif(content: bytes) -> bytes | None:
    format_name = image_format(content[:NUM_BYTES])
    if format_name == "JPEG":
        # A JPEG consists of segments: a marker, a length and the content. Application and comment
        # segments come first.
        at = 2
        while content[at : at + 1] == b"\xff" and content[at + 1 : at + 2] in _APPLICATION:
            stop = at + 2 + int.from_bytes(content[at + 2 : at + 4], "big")
            if content[at + 1] == 0xE1 and content.startswith(_EXIF, at + 4):
                return content[at + 4 : stop]
            at = stop
        return None
    if format_name == "PNG":
        # A PNG consists of chunks: a length, a name, the content and a checksum.
        at = 8
        while at + 8 <= len(content):
            length = int.from_bytes(content[at : at + 4], "big")
            if content[at + 4 : at + 8] == b"eXIf":
                return content[at + 8 : at + 8 + length]
            at += 12 + length
        return None
    # A bit of the extended header says that the file has EXIF data, which follow the pixels.
    if format_name == "WebP" and content[12:16] == b"VP8X" and content[20:21] and content[20] & 8:
        try:
            with WebPImagePlugin.WebPImageFile(io.BytesIO(content)) as image:
                return image.info.get("exif")
        except Exception:  # damaged; decoding will report it
            return None
    return None
