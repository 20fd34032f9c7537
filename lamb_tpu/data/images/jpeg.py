"""Encoded pictures to pixels of one size: only what the crop needs is decoded.

Three things save time over decoding a photograph whole. The entropy-coded rows below the crop are
left alone: the height in the JPEG's header is lowered to where the crop ends, and the decoder stops
there. A crop of twice the wanted size or more is decoded at a half, quarter or eighth of its scale,
which leaves out most of the inverse cosine transform and averages what would otherwise alias
(resized by 'bicubic' it is decoded whole, for that must equal TensorFlow's). The decoder,
libjpeg-turbo in `simplejpeg`, and the resizing, of OpenCV, run without Python's lock.

What is no ordinary JPEG is decoded by Pillow. An orientation told by EXIF is not followed, as in
TensorFlow and torchvision. Of 16 bits a channel the upper eight are kept, as in TensorFlow.

A file of a few bytes may claim to be a picture of billions of pixels, so its header is read before
memory is taken, and too many are refused.
"""

import io
import re
import sys
import threading
from collections.abc import Callable
from typing import Literal, NamedTuple

import cv2
import numpy as np
import simplejpeg
from PIL import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from lamb_tpu.data.images.crops import Box

Resize = Literal["bilinear", "bicubic"]
Kind = Literal["rgb", "grey", "cmyk", "png"]
MAX_PIXELS = 100_000_000  # of a picture, by default: 300 MB decoded

# A picture is the work of one thread; OpenCV's own would only get in the way of the others.
cv2.setNumThreads(1)

# Memory of each thread for the pixels it decodes: new pages for every picture cost a twentieth of
# its time.
_SCRATCH = threading.local()

_START_OF_SCAN = 0xDA
_NOT_FRAMES = (0xC4, 0xC8, 0xCC)  # of the markers 0xC0 to 0xCF, those that are no frame headers
_END = b"\xff\xd9"
# Rows that are left alone look like this. libjpeg tells the first of its warnings only, so there
# was none in the rows that were decoded.
_LEFT_OVER = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker")
_PNG = b"\x89PNG\r\n\x1a\n"
_HARMLESS = re.compile(r"Warning: unknown JFIF revision|Unknown Adobe color transform")


class BadImage(Exception):
    """Why these bytes are no picture that can be used."""


class _Frame(NamedTuple):
    """What a JPEG's frame header tells."""

    height: int
    width: int
    components: int
    height_at: int  # where the two bytes of the height are
    unit: int  # rows that are coded together


def decode_crop(
    content: bytes,
    choose_box: Callable[[int, int], Box],
    size: int,
    max_pixels: int = MAX_PIXELS,
    resize: Resize = "bilinear",
) -> tuple[np.ndarray, Kind]:
    """A part of an encoded picture, resized.

    Args:
      content: a JPEG (grey, RGB, CMYK) or a PNG, whatever its file is called.
      choose_box: (height, width) of the picture -> the part of it.
      size: of the result, at least 8.
      max_pixels: of the whole picture.
      resize: 'bilinear', where a crop of twice the size or more is averaged first, and its edges
        are rounded to whole pixels of that scale; or 'bicubic', that of TensorFlow 1, rounded,
        where a large crop is not averaged, which takes nearly twice the time in all.

    Returns:
      uint8 (size, size, 3) in RGB, and what the picture was.

    Raises:
      BadImage: the content is no picture, has too many pixels, or ends too early, or libjpeg
        objects to the part that had to be decoded. JPEGs have no checksum: damage below the crop
        is not seen, nor what happens to make sense.
    """
    frame = _read_frame(content, max_pixels)
    if frame is None:
        pixels = _decode_other(content, PngImageFile, max_pixels)
        return _resize(_cut(pixels, choose_box(*pixels.shape[:2])), size, resize), "png"
    box = choose_box(frame.height, frame.width)
    if frame.components == 4:
        pixels = _decode_other(content, JpegImageFile, max_pixels)
        return _resize(_cut(pixels, box), size, resize), "cmyk"
    shrink = 1
    if resize == "bilinear":
        shrink = next((n for n in (8, 4, 2) if min(box.height, box.width) >= n * size), 1)
    pixels = _resize(_decode_box(content, frame, box, shrink), size, resize)
    return pixels, "grey" if frame.components == 1 else "rgb"


def decode_whole(content: bytes, max_pixels: int = MAX_PIXELS) -> tuple[np.ndarray, Kind]:
    """All of an encoded picture, uint8 (height, width, 3), in RGB, and what the picture was.

    Raises:
      BadImage: as `decode_crop`, and where bytes are left over, which is how most damage shows.
    """
    frame = _read_frame(content, max_pixels)
    if frame is None:
        return _decode_other(content, PngImageFile, max_pixels), "png"
    if frame.components == 4:
        return _decode_other(content, JpegImageFile, max_pixels), "cmyk"
    pixels = _decode_rows(content, frame.height, frame.width, left_over=False).copy()
    return pixels, "grey" if frame.components == 1 else "rgb"


def picture_size(content: bytes) -> tuple[int, int]:
    """The (height, width) that the header of a JPEG or PNG tells; nothing is decoded.

    Raises:
      BadImage: the content is no picture.
    """
    frame = _read_frame(content, sys.maxsize)
    if frame is not None:
        return frame.height, frame.width
    if not content.startswith(_PNG) or len(content) < 24:
        raise BadImage("it is no JPEG and no PNG")
    return int.from_bytes(content[20:24], "big"), int.from_bytes(content[16:20], "big")


def _read_frame(content: bytes, max_pixels: int) -> _Frame | None:
    """The frame header of a JPEG that has its end; None of what is no JPEG."""
    if not content:
        raise BadImage("the file is empty")
    if content[:2] != b"\xff\xd8":
        return None
    # Segments of a marker, a length and as many bytes come before the scans.
    at, frame = 2, None
    while at + 4 <= len(content) and content[at] == 0xFF:
        marker = content[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if marker == _START_OF_SCAN:
            if frame is None:
                break
            # From here on: a thumbnail in a segment has an end marker of its own.
            if content.rfind(_END, at) < 0:
                raise BadImage("it ends before its end marker")
            _check_size(frame.height, frame.width, max_pixels)
            return frame
        length = int.from_bytes(content[at + 2 : at + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in _NOT_FRAMES and at + 10 <= len(content):
            height = int.from_bytes(content[at + 5 : at + 7], "big")
            width = int.from_bytes(content[at + 7 : at + 9], "big")
            if not (height and width):
                raise BadImage("its header tells no size")
            # Three bytes a component, of which the second holds its share of the rows.
            shares = [value & 15 for value in content[at + 11 : at + 2 + length : 3]]
            frame = _Frame(height, width, content[at + 9], at + 5, 8 * max([1, *shares]))
        at += 2 + length
    raise BadImage("it begins as a JPEG and has no complete header")


def _decode_box(content: bytes, frame: _Frame, box: Box, shrink: int) -> np.ndarray:
    """The box, at a scale of 1 / `shrink`."""
    bottom = box.top + box.height
    # Where colour has fewer rows than light, the last row needs some of the next one's.
    needed = bottom + (frame.unit > 8)
    rows = min(frame.height, -(-needed // frame.unit) * frame.unit)
    shorter: bytes | bytearray = content
    if rows < frame.height:
        shorter = bytearray(content)
        shorter[frame.height_at : frame.height_at + 2] = rows.to_bytes(2, "big")
    pixels = _decode_rows(shorter, -(-rows // shrink), -(-frame.width // shrink))
    if shrink == 1:
        return _cut(pixels, box)
    top, left = box.top // shrink, box.left // shrink
    return pixels[top : -(-bottom // shrink), left : -(-(box.left + box.width) // shrink)]


def _decode_rows(
    content: bytes | bytearray, height: int, width: int, left_over: bool = True
) -> np.ndarray:
    """A JPEG at the scale that gives this size, until this thread decodes the next.

    Args:
      content: the JPEG.
      height, width: of the result.
      left_over: whether bytes may be.
    """
    num_bytes = height * width * 3
    if getattr(_SCRATCH, "pixels", np.empty(0)).size < num_bytes:
        _SCRATCH.pixels = np.empty(num_bytes, np.uint8)
    pixels = _SCRATCH.pixels[:num_bytes]
    try:
        simplejpeg.decode_jpeg(
            content, "RGB", min_height=height, min_width=width, buffer=pixels
        )
    except ValueError as error:
        if not (_HARMLESS.match(str(error)) or (left_over and _LEFT_OVER.match(str(error)))):
            raise BadImage(str(error)) from None
    return pixels.reshape(height, width, 3)


def _decode_other(
    content: bytes, reader: type[ImageFile.ImageFile], max_pixels: int
) -> np.ndarray:
    if reader is PngImageFile and not content.startswith(_PNG):
        raise BadImage("it is no JPEG and no PNG")
    try:
        # Not by Image.open, which has a limit of its own that is the whole process's.
        with reader(io.BytesIO(content)) as picture:
            _check_size(picture.height, picture.width, max_pixels)
            if picture.mode.startswith("I"):  # grey of 16 bits, which Pillow's convert would clip
                grey = (np.asarray(picture) >> 8).astype(np.uint8)
                return np.repeat(grey[..., None], 3, -1)
            return np.asarray(picture.convert("RGB"))
    # Pillow's readers raise several kinds for damaged content.
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise BadImage(" ".join(str(error).split())) from None


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise BadImage(
            f"it claims {height:,} x {width:,} pixels, more than the {max_pixels / 1e6:,g} million "
            "that config.data.options.max_megapixels allows"
        )


def _cut(pixels: np.ndarray, box: Box) -> np.ndarray:
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


def _resize(pixels: np.ndarray, size: int, resize: Resize) -> np.ndarray:
    pixels = pixels.copy()  # OpenCV takes longer over rows with gaps than copying them does
    height, width = pixels.shape[:2]
    if (height, width) == (size, size):
        return pixels
    if resize == "bicubic":
        # OpenCV's resize has the same cubic (a = -0.75), but counts from a pixel's centre, where
        # TensorFlow 1 counts from its corner.
        return cv2.warpAffine(
            pixels, np.array([[width / size, 0, 0], [0, height / size, 0]]), (size, size),
            flags=cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP, borderMode=cv2.BORDER_REPLICATE,
        )
    area = min(height, width) >= 2 * size
    return cv2.resize(
        pixels, (size, size), interpolation=cv2.INTER_AREA if area else cv2.INTER_LINEAR
    )
