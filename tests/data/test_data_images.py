"""Pictures of every mode and orientation, with pixels worked out by hand."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_vlrl.data import images
from npu_vlrl.data.images import decode_base64, decode_image, from_pil, read_image, to_image
from npu_vlrl.data.processor import ImageProcessor
from npu_vlrl.types import DataError, Image

EXIF = Path(__file__).parent.parent / "assets" / "exif"
# An image with no symmetry: what an upright viewer sees.
UPRIGHT = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 10


def encoded(pil: PIL.Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    pil.save(file, kind, **options)
    return file.getvalue()


def test_rgb_pixels_are_kept_and_read_only() -> None:
    image = decode_image(encoded(PIL.Image.fromarray(UPRIGHT)), "x")
    assert np.array_equal(image.rgb, UPRIGHT) and image.size == (3, 2)
    with pytest.raises(ValueError, match="read-only"):
        image.rgb[0, 0] = 1


# EXIF: what was stored, in terms of the upright image (the standard's table of "row 0 is ..., column 0 is ...").
STORED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a),
    7: lambda a: a.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda a: np.rot90(a, -1),
}


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", STORED)
def test_exif_orientations_come_out_upright(orientation: int, kind: str) -> None:
    stored = PIL.Image.fromarray(np.ascontiguousarray(STORED[orientation](UPRIGHT)))
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    data = encoded(stored, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    assert np.array_equal(decode_image(data, "x").rgb, UPRIGHT)


def test_orientations_are_not_all_the_same() -> None:
    distinct = {STORED[k](UPRIGHT).tobytes() + bytes(STORED[k](UPRIGHT).shape) for k in STORED}
    assert len(distinct) == 8


@pytest.mark.parametrize("orientation", [0, 9, 255])
def test_an_invalid_orientation_is_no_turn(orientation: int) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(decode_image(encoded(PIL.Image.fromarray(UPRIGHT), exif=exif), "x").rgb, UPRIGHT)


def test_a_real_photograph_with_orientation_6_is_turned_clockwise() -> None:
    file = EXIF / "Portrait_6.jpg"
    with PIL.Image.open(file) as raw:
        assert raw.size == (1800, 1200)
        expected = np.rot90(np.asarray(raw), -1)
    image = read_image(file, "photo", EXIF)
    assert image.size == (1200, 1800) and np.array_equal(image.rgb, expected)


def test_grey_and_bilevel() -> None:
    grey = PIL.Image.fromarray(np.array([[0, 100, 255]], np.uint8))
    assert decode_image(encoded(grey), "x").rgb.tolist() == [[[0] * 3, [100] * 3, [255] * 3]]
    bits = PIL.Image.new("1", (2, 1))
    bits.putpixel((1, 0), 1)
    assert decode_image(encoded(bits), "x").rgb.tolist() == [[[0] * 3, [255] * 3]]


def test_transparency_lies_on_white() -> None:
    # alpha 0 -> white; 255 -> the colour; 51 = one fifth: 0.2 * c + 0.8 * 255 = 204 + c / 5
    rgba = PIL.Image.fromarray(np.array([[[9, 9, 9, 0], [10, 20, 30, 255], [100, 50, 0, 51]]], np.uint8))
    assert decode_image(encoded(rgba), "x").rgb.tolist() == [[[255] * 3, [10, 20, 30], [224, 214, 204]]]
    la = PIL.Image.new("LA", (1, 1), (100, 51))
    assert decode_image(encoded(la), "x").rgb.tolist() == [[[224] * 3]]


@given(colour=st.integers(0, 255), alpha=st.integers(0, 255))
@settings(max_examples=50, deadline=None)
def test_compositing_rounds_to_nearest(colour: int, alpha: int) -> None:
    pixel = from_pil(PIL.Image.new("RGBA", (1, 1), (colour,) * 3 + (alpha,))).rgb[0, 0, 0]
    assert abs(float(pixel) - (colour * alpha + 255 * (255 - alpha)) / 255) <= 0.5


def test_palettes_with_and_without_transparency() -> None:
    pil = PIL.Image.new("P", (2, 1))
    pil.putpalette([10, 20, 30, 40, 50, 60])
    pil.putpixel((1, 0), 1)
    assert decode_image(encoded(pil), "x").rgb.tolist() == [[[10, 20, 30], [40, 50, 60]]]
    assert decode_image(encoded(pil, transparency=0), "x").rgb.tolist() == [[[255] * 3, [40, 50, 60]]]
    rgb = PIL.Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], np.uint8))
    assert decode_image(encoded(rgb, transparency=(1, 2, 3)), "x").rgb.tolist() == [[[255] * 3, [4, 5, 6]]]


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    values = np.array([[0, 257, 32768, 65535, 128, 129]], np.uint16)  # value / 257, rounded
    expected = [0, 1, 128, 255, 0, 1]
    data = encoded(PIL.Image.fromarray(values))
    with PIL.Image.open(io.BytesIO(data)) as pil:
        assert pil.mode == "I;16"
    assert decode_image(data, "x").rgb[0, :, 0].tolist() == expected
    assert from_pil(PIL.Image.fromarray(values.astype(np.int32))).rgb[0, :, 2].tolist() == expected
    big_endian = encoded(PIL.Image.fromarray(values.astype(">u2")), "TIFF")
    assert decode_image(big_endian, "x").rgb[0, :, 1].tolist() == expected


@pytest.mark.parametrize(
    "pixels", [np.array([[70000]], np.int32), np.array([[-1]], np.int32), np.array([[0.5]], np.float32)]
)
def test_pixels_without_a_range_are_refused(pixels: np.ndarray) -> None:
    with pytest.raises(DataError, match=r"row 3: .*(32 bits|floating-point).*save the image with 8"):
        decode_image(encoded(PIL.Image.fromarray(pixels), "TIFF"), "row 3")


def test_cmyk_and_ycbcr() -> None:
    cmyk = PIL.Image.new("CMYK", (1, 1), (255, 0, 0, 0))  # full cyan ink takes all red away
    assert decode_image(encoded(cmyk, "TIFF"), "x").rgb.tolist() == [[[0, 255, 255]]]
    assert from_pil(PIL.Image.new("YCbCr", (1, 1), (77, 128, 128))).rgb.tolist() == [[[77, 77, 77]]]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation(kind: str) -> None:
    frames = [PIL.Image.new("RGB", (4, 4), colour) for colour in ("#ff0000", "#00ff00")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    with PIL.Image.open(io.BytesIO(data)) as pil:
        assert getattr(pil, "n_frames", 1) == 2
    assert decode_image(data, "x").rgb.reshape(-1, 3).tolist() == [[255, 0, 0]] * 16


def test_zero_bytes_and_other_files() -> None:
    with pytest.raises(DataError, match="t row 1: the image has zero bytes"):
        decode_image(b"", "t row 1")
    for data in (b"hello", b"\0" * 100, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"):
        with pytest.raises(DataError, match="t row 1: not an image .* PNG, JPEG"):
            decode_image(data, "t row 1")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_truncated_files(kind: str) -> None:
    noise = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8))
    data = encoded(noise, kind)
    decode_image(data, "x")
    with pytest.raises(DataError, match=r"t row 2: .*(truncated|not an image)"):
        decode_image(data[: len(data) // 2], "t row 2")


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_files_never_raise_anything_else(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "TIFF"]))
    damaged = bytearray(encoded(PIL.Image.fromarray(UPRIGHT), kind))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert decode_image(bytes(damaged), "x").rgb.shape[2] == 3
    except DataError as error:
        assert str(error).startswith("x: ")


def bomb(width: int, height: int) -> bytes:
    """A PNG of some 60 bytes whose header promises width x height pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_decompression_bombs_are_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    for width, height in ((8193, 8192), (60000, 60000)):
        with pytest.raises(DataError, match=r"t row 9: the image (has 8193x8192|is larger than).* scale it down"):
            decode_image(bomb(width, height), "t row 9")
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", None)  # our own limit does not lean on Pillow's
    with pytest.raises(DataError, match="60000x60000 pixels, more than 67108864"):
        decode_image(bomb(60000, 60000), "t row 9")
    monkeypatch.setattr(images, "MAX_PIXELS", 5)
    with pytest.raises(DataError, match="has 3x2 pixels, more than 5"):
        from_pil(PIL.Image.fromarray(UPRIGHT))


def test_an_image_without_pixels() -> None:
    with pytest.raises(DataError, match="tool result: the image has 0x4 pixels"):
        from_pil(PIL.Image.new("RGB", (0, 4)), "tool result")


def test_paths_may_not_leave_their_root(tmp_path: Path) -> None:
    inside, outside = tmp_path / "data" / "images", tmp_path / "secret.png"
    inside.mkdir(parents=True)
    outside.write_bytes(encoded(PIL.Image.fromarray(UPRIGHT)))
    (inside / "a.png").write_bytes(outside.read_bytes())
    (inside / "link.png").symlink_to(outside)
    root = tmp_path / "data"
    for good in (Path("images/a.png"), inside / "a.png", Path("images/../images/a.png")):
        assert np.array_equal(read_image(good, "x", root).rgb, UPRIGHT)
    for bad in (Path("../secret.png"), outside, Path("images/link.png")):
        with pytest.raises(DataError, match=r"row 5, images\[0\]: the image path .* leaves .*move the image"):
            read_image(bad, "row 5, images[0]", root)
    assert np.array_equal(read_image(outside, "x", None).rgb, UPRIGHT)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    for path in (Path("absent.png"), Path(".")):
        with pytest.raises(DataError, match="row 5: there is no image file .*correct the path"):
            read_image(path, "row 5", tmp_path)
    with pytest.raises(DataError, match="row 5: .*null byte"):
        read_image(Path("a\0b.png"), "row 5", tmp_path)


def test_files_that_cannot_be_read_name_the_beginning_and_the_end_of_their_path(tmp_path: Path) -> None:
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    for path in ("loop.png", "x" * 300, "/".join(["deep"] * 3000), "iVBORw0KGgo" * 10000):
        with pytest.raises(DataError, match=r"^row 5: .*(cannot be read|there is no image file).*; correct ") as error:
            read_image(Path(path), "row 5", tmp_path)
        assert len(str(error.value)) < 400 + len(str(tmp_path))


def test_a_file_without_permission_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.png").write_bytes(b"x")
    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(
        DataError, match=r"row 5: the image file 'a.png' cannot be read \('Permission denied'\); correct"
    ):
        read_image(Path("a.png"), "row 5", tmp_path)


def test_base64() -> None:
    text = base64.b64encode(encoded(PIL.Image.fromarray(UPRIGHT))).decode()
    assert np.array_equal(decode_base64(text, "x").rgb, UPRIGHT)
    for wrong in ("figures/1.png", text[:-3], f"{text} ", "é" * 1000):
        with pytest.raises(
            DataError, match="row 5: the bytes '.*' are text, but not base64 .*; write the encoded"
        ) as e:
            decode_base64(wrong, "row 5")
        assert len(str(e.value)) < 350
    with pytest.raises(DataError, match="row 5: the image has zero bytes"):
        decode_base64("", "row 5")


NARROW = (4_000_000, 16)
"""A PNG of 186 KB, and 240 GB with the white that makes it 200 to 1."""


@pytest.mark.parametrize("size", [NARROW, NARROW[::-1], (1, 120_000)])
def test_images_whose_white_would_fill_the_memory_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(DataError, match=r"row 5: the image has \d+x\d+ pixels, too narrow: .* cut it into parts"):
        decode_image(bomb(*size), "row 5")
    image = Image(np.broadcast_to(np.zeros((1, 1, 3), np.uint8), (size[1], size[0], 3)))
    for use in (lambda: to_image(image, "game"), lambda: ImageProcessor().describe(image)):
        with pytest.raises(DataError, match="too narrow"):
            use()
    assert from_pil(PIL.Image.new("L", (100_000, 16))).size == (100_000, 16)  # 50 million with its white


def test_images_of_other_kinds() -> None:
    image = Image(UPRIGHT.copy())
    assert to_image(image, "x") is image
    array = UPRIGHT.copy()
    copied = to_image(array, "x")
    array[:] = 0
    assert copied == image == to_image(PIL.Image.fromarray(UPRIGHT), "x")
    for wrong in (None, "a.png", UPRIGHT[0], UPRIGHT.astype(float), UPRIGHT[..., :2]):
        with pytest.raises(
            DataError, match="game: an image is an Image, a uint8 array .*, not (NoneType|str|uint8|flo)"
        ):
            to_image(wrong, "game")
    with pytest.raises(DataError, match="game: the image has 0x4 pixels"):
        to_image(np.zeros((4, 0, 3), np.uint8), "game")
