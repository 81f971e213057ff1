"""Images with an error: one message with the image's name, within the memory of one image."""

import base64
import io
import resource
import struct
import zlib
from pathlib import Path

import pytest
from bad_input_rows import each, row
from PIL import Image

from lightrl.models.images import read_image

pytestmark = pytest.mark.bad_input


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width=2, height=2, pixels=None, *others):
    """A gray image, whatever its header says of its size."""
    data = zlib.compress(bytes((width + 1) * height) if pixels is None else pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [chunk(b"IHDR", header), *others, chunk(b"IDAT", data), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def zeros(num_bytes):
    """Compressed, without having them in memory: after a full flush each MiB is the same bytes again."""
    packer = zlib.compressobj(9, wbits=-15)
    block = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    checksum = struct.pack(">HH", num_bytes % 65521, 1)  # Adler-32 of zeros
    return b"\x78\xda" + block * (num_bytes >> 20) + packer.flush() + checksum


BOMB = chunk(b"zTXt", b"note\0\0" + zeros(2**30))
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"

IMAGES = [
    row("image: a file that is not there", None, "Image 'a.png' cannot be read", "No such file", "path to an image"),
    row("image: an empty file", b"", "Image 'a.png' cannot be read", "cannot identify"),
    row("image: cut short", png(64, 64, bytes(range(256)) * 17)[:-40], "Image 'a.png' cannot be read"),
    row("image: fewer pixels than its header says", png(64, 64, b"\0"), "Image 'a.png' cannot be read", "truncated"),
    row("image: a header of 100,000 x 100,000 pixels", png(10**5, 10**5, b"\0"), "Image 'a.png' cannot be read", "10000000000 pixels"),
    row("image: 1 GB of pixels in 1 MB", "pixels", "Image 'a.png' cannot be read", "1073741824 pixels"),
    row("image: 1 GB of text in 1 MB", png(2, 2, None, BOMB), "Image 'a.png' cannot be read", "too large"),
    row("image: 1 GB of zeros", "sparse", "Image 'a.png' cannot be read", "cannot identify"),
    row("image: EPS, which would run Ghostscript", EPS, "Image 'a.png' cannot be read", "cannot identify"),
]  # fmt: skip

URLS = [
    row("image: a data URL without base64", "data:image/png,abc", "no ;base64", "data: URL with base64"),
    row("image: base64 with an error", "data:image/png;base64,a", "Image 'data:image/png;base64,a' cannot be read"),
    row("image: signs that are no base64", "data:image/png;base64,!!", "Image 'data:image/png;base64,!!' cannot be read"),
    row("image: a web address", "https://example.com/a.png", "Image 'https://example.com/a.png' cannot be read", "path"),
]  # fmt: skip


@pytest.fixture
def _little_memory(tmp_path, monkeypatch):
    """256 MiB more than now; what asks for more gets a MemoryError."""
    monkeypatch.chdir(tmp_path)
    now = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) << 10
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + 2**28, hard))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def refused(case, name):
    with pytest.raises(ValueError, match="cannot be read") as caught:
        read_image(name)
    case.check(str(caught.value))


@pytest.mark.usefixtures("_little_memory")
@each(IMAGES)
def test_an_image_is_refused(case):
    content = case.given
    if content == "pixels":
        content = png(2**15, 2**15, b"")[:-12]  # its header is enough
    if content == "sparse":
        with Path("a.png").open("wb") as file:
            file.truncate(10**9)
    elif content is not None:
        Path("a.png").write_bytes(content)
    refused(case, "a.png")


@pytest.mark.usefixtures("_little_memory")
@each(URLS)
def test_an_images_address_is_refused(case):
    refused(case, case.given)


@pytest.mark.usefixtures("_little_memory")
def test_what_an_image_has_beyond_its_pixels_is_not_unpacked():
    Path("a.png").write_bytes(png(2, 2, b"").replace(chunk(b"IDAT", zlib.compress(b"")), chunk(b"IDAT", zeros(2**30))))
    assert read_image("a.png").size == (2, 2)
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2)).save(buffer, format="JPEG")
    assert read_image("data:;base64," + base64.b64encode(buffer.getvalue()).decode()).size == (3, 2)
