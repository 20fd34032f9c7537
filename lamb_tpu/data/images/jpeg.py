"""Decodes crops of images to one size, and decodes only the parts that a crop needs.

Three things save time over decoding a full photograph. The entropy-coded rows below the crop are
skipped: the height in the JPEG's header is reduced to the end of the crop, and the decoder stops
there. A crop of at least twice the result's size is decoded at a half, quarter or eighth of its
scale, which skips most of the inverse cosine transform and averages pixels to prevent aliasing (not
for 'bicubic', because its result must equal TensorFlow's). Both the decoder, libjpeg-turbo
in `simplejpeg`, and OpenCV's resizing release Python's global lock, so threads run in parallel.

Pillow decodes everything that is not an ordinary JPEG: PNG, WebP, BMP, and JPEGs in CMYK. The first
image of an animation is used. EXIF orientation is ignored, as in TensorFlow and torchvision.
Channels of 16 bits are reduced to their upper eight, as in TensorFlow.

A file of a few bytes may claim billions of pixels, so the header is read before memory is
allocated, and an image that would take too much memory is rejected. The limit on pixels is lower
for formats that need more memory per pixel: `_BYTES` has the peak memory per pixel of each format,
measured as the growth of the process's memory.
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
from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from lamb_tpu.data.images import headers
from lamb_tpu.data.images.crops import Box
from lamb_tpu.errors import listed, reason

Resize = Literal["bilinear", "bicubic"]
Kind = Literal["rgb", "grey", "cmyk", "png", "webp", "bmp", "animated"]
MAX_PIXELS = 100_000_000  # default limit for an ordinary JPEG: 600 MB while it is decoded
BYTES_PER_PIXEL = 6  # of an ordinary JPEG: the decoded pixels, and a copy of the crop
# Format -> bytes for each pixel. For a JPEG in several scans, the decoder holds two bytes for each
# coefficient. Pillow stores a colour pixel in four bytes, three of which are copied; its WebP
# decoder also holds two canvases and the encoded image.
_BYTES = {
    "JPEG": BYTES_PER_PIXEL,
    "JPEG in several scans": 9,
    "CMYK JPEG": 7,
    "CMYK JPEG in several scans": 12,
    "PNG": 7,
    "BMP": 7,
    "WebP": 16,
}
# Each scan of a progressive JPEG covers all pixels but may take only a few bytes of the file.
# Encoders make about ten scans.
_MAX_SCANS = 100

# Images are decoded in parallel, each by one thread; OpenCV's threads would only compete.
cv2.setNumThreads(1)

# Each thread reuses a buffer for decoded pixels, because new memory pages for every image would take
# a twentieth of the time. The buffer grows up to this limit.
_SCRATCH = threading.local()
_SCRATCH_BYTES = 2**26
_STRIP_PIXELS = 2**16  # pixels that are converted from Pillow's format at a time

_START_OF_SCAN = 0xDA
_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
_NOT_FRAMES = (0xC4, 0xC8, 0xCC)  # markers among 0xC0 to 0xCF that are not frame headers
_END = b"\xff\xd9"
# libjpeg reports only its first warning. If that is this warning, about skipped rows, the decoded
# rows gave no warning.
_LEFT_OVER = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker")
# Format -> Pillow's reader and the kind of image.
_READERS: dict[str, tuple[type[ImageFile.ImageFile], Kind]] = {
    "PNG": (PngImageFile, "png"),
    "WebP": (WebPImageFile, "webp"),
    "BMP": (BmpImageFile, "bmp"),
}
_HARMLESS = re.compile(r"Warning: unknown JFIF revision|Unknown Adobe color transform")


class BadImage(Exception):
    """The content is not a usable image; the message is the reason."""


class _Frame(NamedTuple):
    height: int
    width: int
    components: int
    height_at: int  # offset in the file of the height's two bytes
    unit: int  # number of rows that are coded together
    scans: bool  # whether there are several scans; the decoder then holds all coefficients

    @property
    def format(self) -> str:
        return ("CMYK " * (self.components == 4)) + "JPEG" + (" in several scans" * self.scans)

    @property
    def kind(self) -> Kind:
        return "grey" if self.components == 1 else "rgb"


def decode_crop(
    content: bytes,
    choose_box: Callable[[int, int], Box],
    size: int,
    max_pixels: int = MAX_PIXELS,
    resize: Resize = "bilinear",
) -> tuple[np.ndarray, Kind]:
    """Decodes and resizes a box of an encoded image.

    Args:
      content: a JPEG (grey, RGB, CMYK), PNG, WebP or BMP, whatever its file name.
      choose_box: function that returns the box for the image's (height, width).
      size: height and width of the result, at least 8.
      max_pixels: the maximum number of pixels of an ordinary JPEG. Formats that need more memory
        have a lower limit, so that no image takes more than `BYTES_PER_PIXEL * max_pixels` bytes.
      resize: 'bilinear': a crop of at least twice the size is averaged first, and its edges are
        rounded to whole pixels of the smaller scale. 'bicubic': TensorFlow 1's method, with the
        result rounded to integers. Large crops are decoded at full scale and not averaged first, so
        decoding and resizing together take nearly twice as long as with 'bilinear'.

    Returns:
      uint8 (size, size, 3) in RGB, and the kind of the image.

    Raises:
      BadImage: the content is not an image, has too many pixels, or ends too early, or libjpeg
        warns about the decoded part. JPEGs have no checksum: damage below the crop, and damage that
        decodes without a warning, is not detected.
    """
    frame = _read_frame(content, max_pixels)
    if frame is None or frame.components == 4:
        pixels, kind = _decode_by_pillow(content, frame, max_pixels, choose_box)
        return _resize(pixels, size, resize), kind
    box = choose_box(frame.height, frame.width)
    shrink = 1
    if resize == "bilinear":
        shrink = next((n for n in (8, 4, 2) if min(box.height, box.width) >= n * size), 1)
    return _resize(_decode_box(content, frame, box, shrink), size, resize), frame.kind


def decode_full(content: bytes, max_pixels: int = MAX_PIXELS) -> tuple[np.ndarray, Kind]:
    """Decodes a full image; returns uint8 (height, width, 3) in RGB, and the kind of the image.

    Raises:
      BadImage: see `decode_crop`; also if undecoded bytes are left over, which detects most damage.
    """
    frame = _read_frame(content, max_pixels)
    if frame is None or frame.components == 4:
        return _decode_by_pillow(
            content, frame, max_pixels, lambda height, width: Box(0, 0, height, width)
        )
    # Copied, because the thread reuses the buffer.
    return _decode_rows(content, frame.height, frame.width, left_over=False).copy(), frame.kind


def image_size(content: bytes) -> tuple[int, int]:
    """Reads (height, width) from an image's header; raises BadImage if the content is not an image."""
    frame = _read_frame(content, sys.maxsize)
    if frame is not None:
        return frame.height, frame.width
    _check_format(content)
    size = headers.header_size(content)
    if size is None:
        raise BadImage("its header is incomplete")
    return size


def _read_frame(content: bytes, max_pixels: int) -> _Frame | None:
    """Reads the frame header of a complete JPEG; returns None if the content is not a JPEG."""
    if not content:
        raise BadImage("the file is empty")
    if content[:2] != b"\xff\xd8":
        return None
    # Segments, which are a marker, a length and the content, come before the scans.
    at, frame = 2, None
    while at + 4 <= len(content) and content[at] == 0xFF:
        marker = content[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if marker == _START_OF_SCAN:
            if frame is None:
                break
            # Searched from here on, because a thumbnail in a segment has an end marker too.
            if content.rfind(_END, at) < 0:
                raise BadImage("it ends before its end marker")
            if frame.scans:
                num_scans = content.count(bytes([0xFF, _START_OF_SCAN]), at)
                if num_scans > _MAX_SCANS:
                    raise BadImage(f"it has {num_scans:,} scans, more than {_MAX_SCANS}")
            # The byte after the length is the number of components in the first scan.
            elif content[at + 4 : at + 5] < bytes([frame.components]):
                frame = frame._replace(scans=True)
            _check_size(frame.height, frame.width, frame.format, max_pixels)
            return frame
        length = int.from_bytes(content[at + 2 : at + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in _NOT_FRAMES and at + 10 <= len(content):
            # The marker and the length are followed by a byte of precision, height, width, and the
            # number of components.
            height = int.from_bytes(content[at + 5 : at + 7], "big")
            width = int.from_bytes(content[at + 7 : at + 9], "big")
            if not (height and width):
                raise BadImage("its header has a height or width of 0")
            # Three bytes for each component; the second byte has the sampling factors.
            shares = [value & 15 for value in content[at + 11 : at + 2 + length : 3]]
            frame = _Frame(
                height=height,
                width=width,
                components=content[at + 9],
                height_at=at + 5,
                unit=8 * max([1, *shares]),
                scans=marker in _PROGRESSIVE,
            )
        at += 2 + length
    raise BadImage("it begins like a JPEG but has no complete header")


def _decode_box(content: bytes, frame: _Frame, box: Box, shrink: int) -> np.ndarray:
    bottom = box.top + box.height
    # If chroma has fewer rows than luma, the last row depends on the next row of chroma.
    needed = bottom + (frame.unit > 8)
    # Rows are coded in units, so the height is rounded up to a multiple of the unit.
    rows = min(frame.height, -(-needed // frame.unit) * frame.unit)
    shorter: bytes | bytearray = content
    if rows < frame.height:
        shorter = bytearray(content)
        shorter[frame.height_at : frame.height_at + 2] = rows.to_bytes(2, "big")
    pixels = _decode_rows(shorter, -(-rows // shrink), -(-frame.width // shrink))
    # Edges are rounded outwards to whole pixels of the smaller scale.
    top, left = box.top // shrink, box.left // shrink
    return pixels[top : -(-bottom // shrink), left : -(-(box.left + box.width) // shrink)]


def _decode_rows(
    content: bytes | bytearray, height: int, width: int, left_over: bool = True
) -> np.ndarray:
    """Decodes a JPEG, at the scale that gives this size, into the thread's buffer.

    The result is valid until the thread decodes again. `left_over`: whether undecoded bytes may
    remain.
    """
    num_bytes = height * width * 3
    scratch: np.ndarray = getattr(_SCRATCH, "pixels", np.empty(0))
    if scratch.size < num_bytes:
        scratch = np.empty(num_bytes, np.uint8)
        # Huge images are rare, so their buffers are not reused.
        if num_bytes <= _SCRATCH_BYTES:
            _SCRATCH.pixels = scratch
    pixels = scratch[:num_bytes]
    try:
        simplejpeg.decode_jpeg(content, "RGB", min_height=height, min_width=width, buffer=pixels)
    except ValueError as error:
        if not (_HARMLESS.match(str(error)) or (left_over and _LEFT_OVER.match(str(error)))):
            raise BadImage(str(error)) from None
    return pixels.reshape(height, width, 3)


def _check_format(content: bytes) -> str:
    """Returns the format of an image that is not a JPEG; raises BadImage if unsupported."""
    format_name = headers.image_format(content[: headers.NUM_BYTES])
    if format_name not in _READERS:
        problem = f"its format is {format_name}" if format_name else "it is not an image"
        raise BadImage(f"{problem}; use {listed(headers.FORMATS)}")
    return format_name


def _decode_by_pillow(
    content: bytes, frame: _Frame | None, max_pixels: int, choose_box: Callable[[int, int], Box]
) -> tuple[np.ndarray, Kind]:
    """Decodes a box of the first image of a file; `frame` is the header of a CMYK JPEG, or None."""
    if frame is None:
        name = _check_format(content)
        reader, kind = _READERS[name]
        # Checked first, because the WebP reader allocates the image when it is opened.
        if (size := headers.header_size(content)) is not None:
            _check_size(*size, name, max_pixels)
    else:
        reader, kind, name = JpegImageFile, "cmyk", frame.format
    try:
        # Does not use Image.open, because its size limit is global to the process.
        with reader(io.BytesIO(content)) as photograph:
            _check_size(photograph.height, photograph.width, name, max_pixels)
            if frame is None and getattr(photograph, "is_animated", False):
                kind = "animated"
            box = choose_box(photograph.height, photograph.width)
            photograph.load()
            # Alpha is dropped. Pillow would warn about alpha in a palette.
            photograph.info.pop("transparency", None)
            pixels = np.empty((box.height, box.width, 3), np.uint8)
            # Converted in strips, because converting the full image would hold three more copies.
            rows = max(1, _STRIP_PIXELS // box.width)
            for start in range(0, box.height, rows):
                stop = min(start + rows, box.height)
                pixels[start:stop] = _strip(
                    photograph, Box(box.top + start, box.left, stop - start, box.width)
                )
            return pixels, kind
    except BadImage:
        raise
    # Pillow's readers raise many types of errors for damaged content.
    except Exception as error:
        raise BadImage(reason(error)) from None


def _strip(photograph: Image.Image, box: Box) -> np.ndarray:
    """Converts a box of a loaded image to uint8 (height, width, 3), or (..., 1) for 16-bit grey."""
    strip = photograph.crop((box.left, box.top, box.left + box.width, box.top + box.height))
    if strip.mode.startswith("I"):  # grey of 16 bits, which Pillow's convert would clip
        return (np.asarray(strip) >> 8).astype(np.uint8)[..., None]
    return np.asarray(strip.convert("RGB"))


def _check_size(height: int, width: int, name: str, max_pixels: int) -> None:
    needed, most = height * width * _BYTES[name], max_pixels * BYTES_PER_PIXEL
    if needed > most:
        raise BadImage(
            f"it claims {height:,} x {width:,} pixels, whose decoding takes {_megabytes(needed)} "
            f"({_BYTES[name]} bytes per pixel of a {name}), more than the {_megabytes(most)} that "
            f"config.data.options.max_megapixels={max_pixels / 1e6:g} allows"
        )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.{0 if size >= 10_000_000 else 4}f} MB"


def _resize(pixels: np.ndarray, size: int, resize: Resize) -> np.ndarray:
    height, width = pixels.shape[:2]
    if (height, width) == (size, size):
        return pixels.copy()
    pixels = np.ascontiguousarray(pixels)  # a copy is faster than OpenCV on strided rows
    if resize == "bicubic":
        # OpenCV's resize has TensorFlow 1's cubic kernel (a = -0.75), but measures from the pixels'
        # centres; TensorFlow 1 measures from their corners.
        return cv2.warpAffine(
            pixels,
            np.array([[width / size, 0, 0], [0, height / size, 0]]),
            (size, size),
            flags=cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP,
            borderMode=cv2.BORDER_REPLICATE,
        )
    area = min(height, width) >= 2 * size
    return cv2.resize(
        pixels, (size, size), interpolation=cv2.INTER_AREA if area else cv2.INTER_LINEAR
    )
