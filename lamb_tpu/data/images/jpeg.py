"""Decoding of pictures to one size, limited to the parts that the crop needs.

Three things save time over decoding a whole photograph. The entropy-coded rows below the crop are
skipped: the height in the JPEG's header is reduced to the end of the crop, and the decoder stops
there. A crop of twice the wanted size or more is decoded at a half, quarter or eighth of its scale,
which skips most of the inverse cosine transform and averages pixels against aliasing (for 'bicubic'
it is decoded at full scale, because the result must equal TensorFlow's). The decoder, libjpeg-turbo
in `simplejpeg`, and OpenCV's resizing run without Python's global lock.

Pillow decodes everything that is not an ordinary JPEG: PNG, WebP, BMP, and JPEGs in CMYK. Of an
animation the first image is taken. EXIF orientation is ignored, as in TensorFlow and torchvision.
Of channels with 16 bits the upper eight are kept, as in TensorFlow.

A file of a few bytes may claim billions of pixels, so the header is read before memory is
allocated, and too large pictures are refused.
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
from PIL.BmpImagePlugin import BmpImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from lamb_tpu.data.images import headers
from lamb_tpu.data.images.crops import Box

Resize = Literal["bilinear", "bicubic"]
Kind = Literal["rgb", "grey", "cmyk", "png", "webp", "bmp", "animated"]
MAX_PIXELS = 100_000_000  # default limit of a picture: 300 MB decoded

# One thread processes a picture; OpenCV's own threads would only disturb the others.
cv2.setNumThreads(1)

# Each thread's buffer for decoded pixels: new pages for every picture would cost a twentieth of the
# time.
_SCRATCH = threading.local()

_START_OF_SCAN = 0xDA
_NOT_FRAMES = (0xC4, 0xC8, 0xCC)  # of the markers 0xC0 to 0xCF, those that are no frame headers
_END = b"\xff\xd9"
# The warning for skipped rows. libjpeg reports only its first warning, so the decoded rows had
# none.
_LEFT_OVER = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker")
# Format -> Pillow's reader, and the kind.
_READERS: dict[str, tuple[type[ImageFile.ImageFile], Kind]] = {
    "PNG": (PngImageFile, "png"),
    "WebP": (WebPImageFile, "webp"),
    "BMP": (BmpImageFile, "bmp"),
}
_HARMLESS = re.compile(r"Warning: unknown JFIF revision|Unknown Adobe color transform")


class BadImage(Exception):
    """The content is not a usable picture; the message has the reason."""


class _Frame(NamedTuple):
    """Content of a JPEG's frame header."""

    height: int
    width: int
    components: int
    height_at: int  # offset of the two bytes of the height
    unit: int  # number of rows that are coded together


def decode_crop(
    content: bytes,
    choose_box: Callable[[int, int], Box],
    size: int,
    max_pixels: int = MAX_PIXELS,
    resize: Resize = "bilinear",
) -> tuple[np.ndarray, Kind]:
    """Decodes and resizes a part of an encoded picture.

    Args:
      content: a JPEG (grey, RGB, CMYK), PNG, WebP or BMP, whatever its file name is.
      choose_box: function from (height, width) of the picture to the part.
      size: height and width of the result, at least 8.
      max_pixels: the largest number of pixels of the whole picture.
      resize: 'bilinear': a crop of twice the size or more is averaged first, and its edges are
        rounded to whole pixels of that scale. 'bicubic': that of TensorFlow 1, rounded; large crops
        are not averaged, which takes nearly twice the time in all.

    Returns:
      uint8 (size, size, 3) in RGB, and the kind of the picture.

    Raises:
      BadImage: the content is not a picture, has too many pixels, or ends too early, or libjpeg
        warns about the decoded part. JPEGs have no checksum: damage below the crop is not noticed,
        nor damage that decodes without a warning.
    """
    frame = _read_frame(content, max_pixels)
    if frame is None:
        pixels, kind = _decode_other(content, max_pixels)
        return _resize(_cut(pixels, choose_box(*pixels.shape[:2])), size, resize), kind
    box = choose_box(frame.height, frame.width)
    if frame.components == 4:
        pixels, _ = _decode_by(JpegImageFile, content, max_pixels)
        return _resize(_cut(pixels, box), size, resize), "cmyk"
    shrink = 1
    if resize == "bilinear":
        shrink = next((n for n in (8, 4, 2) if min(box.height, box.width) >= n * size), 1)
    pixels = _resize(_decode_box(content, frame, box, shrink), size, resize)
    return pixels, "grey" if frame.components == 1 else "rgb"


def decode_whole(content: bytes, max_pixels: int = MAX_PIXELS) -> tuple[np.ndarray, Kind]:
    """Decodes a whole picture to uint8 (height, width, 3) in RGB; returns it and its kind.

    Raises:
      BadImage: see `decode_crop`; also if bytes are left over, which shows most damage.
    """
    frame = _read_frame(content, max_pixels)
    if frame is None:
        return _decode_other(content, max_pixels)
    if frame.components == 4:
        return _decode_by(JpegImageFile, content, max_pixels)[0], "cmyk"
    # A copy, because the thread's buffer is used again.
    pixels = _decode_rows(content, frame.height, frame.width, left_over=False).copy()
    return pixels, "grey" if frame.components == 1 else "rgb"


def picture_size(content: bytes) -> tuple[int, int]:
    """Returns (height, width) from an image's header, without decoding.

    Raises:
      BadImage: the content is not a picture.
    """
    frame = _read_frame(content, sys.maxsize)
    if frame is not None:
        return frame.height, frame.width
    _check_format(content)
    size = headers.header_size(content)
    if size is None:
        raise BadImage("its header is incomplete")
    return size


def _read_frame(content: bytes, max_pixels: int) -> _Frame | None:
    """Returns the frame header of a complete JPEG; None if the content is not a JPEG."""
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
            # Searched from here on, because a thumbnail in a segment has its own end marker.
            if content.rfind(_END, at) < 0:
                raise BadImage("it ends before its end marker")
            _check_size(frame.height, frame.width, max_pixels)
            return frame
        length = int.from_bytes(content[at + 2 : at + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in _NOT_FRAMES and at + 10 <= len(content):
            # After the marker and the length: a byte of precision, height, width, number of
            # components.
            height = int.from_bytes(content[at + 5 : at + 7], "big")
            width = int.from_bytes(content[at + 7 : at + 9], "big")
            if not (height and width):
                raise BadImage("its header tells no size")
            # Three bytes for each component; the second has its sampling factors.
            shares = [value & 15 for value in content[at + 11 : at + 2 + length : 3]]
            frame = _Frame(height, width, content[at + 9], at + 5, 8 * max([1, *shares]))
        at += 2 + length
    raise BadImage("it begins as a JPEG and has no complete header")


def _decode_box(content: bytes, frame: _Frame, box: Box, shrink: int) -> np.ndarray:
    """Decodes the box at a scale of 1 / `shrink`."""
    bottom = box.top + box.height
    # Where colour has fewer rows than light, the last row needs some of the next one's.
    needed = bottom + (frame.unit > 8)
    # Rows are coded in units, so the height is rounded up to whole units.
    rows = min(frame.height, -(-needed // frame.unit) * frame.unit)
    shorter: bytes | bytearray = content
    if rows < frame.height:
        shorter = bytearray(content)
        shorter[frame.height_at : frame.height_at + 2] = rows.to_bytes(2, "big")
    pixels = _decode_rows(shorter, -(-rows // shrink), -(-frame.width // shrink))
    if shrink == 1:
        return _cut(pixels, box)
    # Edges are rounded outwards to whole pixels of the smaller scale.
    top, left = box.top // shrink, box.left // shrink
    return pixels[top : -(-bottom // shrink), left : -(-(box.left + box.width) // shrink)]


def _decode_rows(
    content: bytes | bytearray, height: int, width: int, left_over: bool = True
) -> np.ndarray:
    """Decodes a JPEG at the scale that gives this size, into the thread's buffer.

    Args:
      content: the JPEG.
      height, width: size of the result, which is valid until the thread decodes again.
      left_over: whether undecoded bytes may remain.
    """
    num_bytes = height * width * 3
    # The buffer grows to the largest picture that the thread has seen.
    if getattr(_SCRATCH, "pixels", np.empty(0)).size < num_bytes:
        _SCRATCH.pixels = np.empty(num_bytes, np.uint8)
    pixels = _SCRATCH.pixels[:num_bytes]
    try:
        simplejpeg.decode_jpeg(content, "RGB", min_height=height, min_width=width, buffer=pixels)
    except ValueError as error:
        if not (_HARMLESS.match(str(error)) or (left_over and _LEFT_OVER.match(str(error)))):
            raise BadImage(str(error)) from None
    return pixels.reshape(height, width, 3)


def _decode_other(content: bytes, max_pixels: int) -> tuple[np.ndarray, Kind]:
    """Decodes what is not a JPEG, and returns its kind."""
    reader, kind = _READERS[_check_format(content)]
    size = headers.header_size(content)
    # Before the reader sees it: that of WebP allocates the image when it is opened.
    if size is not None:
        _check_size(*size, max_pixels)
    pixels, animated = _decode_by(reader, content, max_pixels)
    return pixels, "animated" if animated else kind


def _check_format(content: bytes) -> str:
    """Returns the format of content that is not a JPEG; raises BadImage if it is not read."""
    found = headers.image_format(content[: headers.NUM_BYTES])
    if found not in _READERS:
        *others, last = headers.FORMATS
        raise BadImage(
            f"{f'its format is {found}' if found else 'it is not an image'}; {', '.join(others)} "
            f"and {last} are read"
        )
    return found


def _decode_by(
    reader: type[ImageFile.ImageFile], content: bytes, max_pixels: int
) -> tuple[np.ndarray, bool]:
    """Decodes the first image by one of Pillow's readers; returns whether more images follow."""
    try:
        # Image.open is avoided: it has a size limit of its own, for the whole process.
        with reader(io.BytesIO(content)) as picture:
            _check_size(picture.height, picture.width, max_pixels)
            animated = bool(getattr(picture, "is_animated", False))
            if picture.mode.startswith("I"):  # grey of 16 bits, which Pillow's convert would clip
                grey = (np.asarray(picture) >> 8).astype(np.uint8)
                return np.repeat(grey[..., None], 3, -1), animated
            return np.asarray(picture.convert("RGB")), animated
    except BadImage:
        raise
    # Pillow's readers raise many types of errors for damaged content.
    except Exception as error:
        raise BadImage(" ".join(str(error).split()) or type(error).__name__) from None


def _check_size(height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels:
        raise BadImage(
            f"it claims {height:,} x {width:,} pixels, more than the {max_pixels / 1e6:,g} million "
            "that config.data.options.max_megapixels allows"
        )


def _cut(pixels: np.ndarray, box: Box) -> np.ndarray:
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


def _resize(pixels: np.ndarray, size: int, resize: Resize) -> np.ndarray:
    pixels = pixels.copy()  # copying is faster than OpenCV on rows with gaps
    height, width = pixels.shape[:2]
    if (height, width) == (size, size):
        return pixels
    if resize == "bicubic":
        # OpenCV's resize has the same cubic (a = -0.75), but counts from a pixel's centre;
        # TensorFlow 1 counts from its corner.
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
