"""Pictures of every kind, good and hostile, become RGB or a clear error."""

import numpy as np
import pytest
from media_files import FORMATS, clip, encoded, hostile, many_scans, picture, truncated, unusual
from PIL import Image

from quire.features.media.workers import videos
from quire.features.media.workers.images import MAX_PIXELS, decode_image
from quire.features.media.workers.videos import decode_video, wanted_frames
from quire.types.errors import InvalidParameter, NotSupported, RequestError


@pytest.mark.parametrize("name", unusual())
def test_unusual_pictures_are_read(name):
    image = decode_image(unusual()[name])
    assert image.mode == "RGB"
    sizes = {"turned": (30, 40), "one pixel": (1, 1), "long": (1, 200)}
    assert image.size == sizes.get(name, (40, 30))


@pytest.mark.parametrize("name", hostile())
def test_hostile_pictures_are_refused_by_their_header(name):
    with pytest.raises(RequestError) as refused:
        decode_image(hostile()[name])
    assert "svg" not in name or "SVG" in str(refused.value)
    assert name not in ("a bomb", "100 megapixels", "a large gif", "a large bmp") or f"{MAX_PIXELS // 10**6} million" in str(
        refused.value
    )


@pytest.mark.parametrize("form", FORMATS)
def test_truncated_pictures_are_refused_or_whole(form):
    """A file that ends within its pixels is refused. What may be missing is what stands after them."""
    whole, refused = decode_image(encoded(picture(), form)), 0
    for data in truncated(form):
        try:
            image = decode_image(data)
        except InvalidParameter:
            refused += 1
        else:
            assert np.array_equal(image, whole)
    assert refused >= 9


def test_transparency_is_white_and_16_bits_keep_the_upper_8():
    clear = Image.new("RGBA", (2, 2), (10, 20, 30, 0))
    assert decode_image(encoded(clear)).getpixel((0, 0)) == (255, 255, 255)
    assert decode_image(encoded(clear), {"rgba_background_color": [1, 2, 3]}).getpixel((0, 0)) == (1, 2, 3)
    half = Image.new("RGBA", (2, 2), (0, 0, 0, 128))
    assert decode_image(encoded(half)).getpixel((0, 0)) == (127, 127, 127)
    deep = Image.fromarray(np.full((2, 2), 0x80FF, np.uint16))
    assert decode_image(encoded(deep)).getpixel((0, 0)) == (128, 128, 128)


def test_lossless_pictures_keep_every_pixel():
    for form in ("PNG", "BMP", "TIFF"):
        assert np.array_equal(decode_image(encoded(picture(), form)), picture())


def test_an_svg_is_refused_by_name():
    with pytest.raises(NotSupported, match="SVG"):
        decode_image(b"\xef\xbb\xbf  <svg/>")


def test_frames_are_taken_at_equal_distances():
    assert wanted_frames(10, 1.0, {"num_frames": 4}) == [0, 3, 6, 9]
    assert wanted_frames(5, 1.0, {}) == [0, 1, 2, 3, 4]
    assert wanted_frames(300, 30.0, {"fps": 1}) == [round(i * 299 / 9) for i in range(10)]
    assert wanted_frames(7, 30.0, {"num_frames": 1}) == [0]
    with pytest.raises(InvalidParameter, match="frames"):
        wanted_frames(10**6, 1.0, {})


def test_a_jpeg_of_many_scans_is_refused():
    with pytest.raises(InvalidParameter, match="scans; at most 40 are supported"):
        decode_image(many_scans())
    assert decode_image(encoded(picture(), "JPEG", progressive=True)).size == (40, 30)
    assert decode_image(encoded(picture(), "JPEG", icc_profile=b"\xff\xda" * 100)).size == (40, 30)  # no scans


def test_frames_of_a_long_clip():
    video = decode_video(clip(10_000), {"num_frames": 8})
    assert video.frames.shape == (8, 16, 16, 3) and video.duration == pytest.approx(10_000 / 25)
    assert video.seconds[-1] == pytest.approx(9_999 / 25)
    with pytest.raises(InvalidParameter, match="broken"):
        decode_video(clip(50)[:300], {})


@pytest.mark.parametrize(("atom", "offset"), [(b"stts", 12), (b"mdhd", 20), (b"mvhd", 20)])
def test_a_header_that_counts_frames_that_are_not_there(atom, offset):
    """Frames are taken from those that there are."""
    whole = clip(50)
    lying = bytearray(whole)
    at = lying.index(atom) + offset
    lying[at : at + 4] = (90_000).to_bytes(4, "big")
    expected, found = decode_video(whole, {"num_frames": 8}), decode_video(bytes(lying), {"num_frames": 8})
    assert (found.frames == expected.frames).all()
    assert (found.seconds, found.duration) == (expected.seconds, expected.duration)


def test_a_clip_that_takes_too_long_is_refused_early(monkeypatch):
    monkeypatch.setattr(videos, "DECODE_PATIENCE_S", 0.0)
    monkeypatch.setattr(videos, "DECODE_SECONDS", 1e-9)
    with pytest.raises(InvalidParameter, match="would take more than"):
        decode_video(clip(50), {})
    monkeypatch.setattr(videos, "DECODE_SECONDS", 60.0)
    assert len(decode_video(clip(50), {}).frames) == 32
