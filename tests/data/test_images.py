"""One policy for pictures: what Pillow composes by hand is the oracle, over every route a picture may come by."""

import io
import tarfile

import numpy as np
import pytest
from PIL import Image, ImageDraw

from hf_infcl.data import ImageTextCollator, ImageTextDataset, load_image_text_dataset
from hf_infcl.data.images import UnreadableImageError, read_image
from tests.tiny import tiny_processor


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def palette_with_hidden_magenta():
    image = Image.new("P", (32, 32), 0)
    image.putpalette([255, 0, 255, 0, 0, 0])
    image.paste(1, (8, 8, 24, 24))
    return encoded(image, transparency=0)


def red_hidden_around_blue():
    image = Image.new("RGBA", (32, 32), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (8, 8, 24, 24))
    return encoded(image)


def half_transparent_grey():
    return encoded(Image.new("LA", (32, 32), (128, 64)))


def over_white(rgb, alpha):
    return tuple(round(channel * alpha / 255 + 255 * (1 - alpha / 255)) for channel in rgb)


def by_path(data, folder):
    (folder / "picture.bin").write_bytes(data)
    return [{"image": str(folder / "picture.bin"), "caption": "a"}]


def by_bytes(data, folder):
    return [{"image": data, "caption": "a"}]


def by_pil(data, folder):
    return [{"image": Image.open(io.BytesIO(data)), "caption": "a"}]


def by_datasets(data, folder):
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature

    features = Features({"image": ImageFeature(), "caption": Value("string")})
    return Dataset.from_dict({"image": [{"bytes": data, "path": None}], "caption": ["a"]}, features=features)


def by_parquet_binary(data, folder):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset

    pq.write_table(pa.table({"image": pa.array([data], pa.binary()), "caption": ["a"]}), folder / "t.parquet")
    return Dataset.from_parquet(str(folder / "t.parquet"), cache_dir=str(folder / "cache"))


def by_tar(data, folder):
    with tarfile.open(folder / "t.tar", "w") as tar:
        for name, content in (("000.PNG", data), ("000.TXT", b"a")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return load_image_text_dataset(folder / "t.tar")


ROUTES = [by_path, by_bytes, by_pil, by_datasets, by_parquet_binary, by_tar]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("make", "corner", "centre"),
    [
        (palette_with_hidden_magenta, (255, 255, 255), (0, 0, 0)),
        (red_hidden_around_blue, (255, 255, 255), (0, 0, 255)),
        (half_transparent_grey, over_white((128,) * 3, 64), over_white((128,) * 3, 64)),
    ],
)
def test_transparency_is_composited_on_white_by_every_route(tmp_path, route, make, corner, centre):
    pair = ImageTextDataset(route(make(), tmp_path))[0]
    pixels = ImageTextCollator(tiny_processor("clip"))([pair])["pixel_values"][0]
    assert pixels.dtype.is_floating_point is False
    for (y, x), wanted in (((0, 0), corner), ((16, 16), centre)):
        assert np.abs(pixels[:, y, x].numpy().astype(int) - np.array(wanted)).max() <= 1


def test_cmyk_becomes_rgb():
    data = encoded(Image.new("CMYK", (32, 32), (0, 255, 255, 0)), "JPEG", quality=100)
    assert np.abs(np.array(read_image(data).getpixel((9, 9))) - (255, 0, 0)).max() <= 3


@pytest.mark.parametrize(("kind", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})])
def test_first_frame_of_an_animation(kind, options):
    red, green = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("RGB", (8, 8), (0, 255, 0))
    data = encoded(red, kind, save_all=True, append_images=[green], **options)
    moved = Image.open(io.BytesIO(data))
    moved.seek(1)
    assert read_image(data).getpixel((4, 4)) == (255, 0, 0)
    assert read_image(moved).getpixel((4, 4)) == (255, 0, 0)


def test_type_is_decided_by_content(tmp_path):
    path = tmp_path / "picture.jpg"
    path.write_bytes(encoded(Image.new("RGB", (4, 4), (1, 2, 3))))
    assert read_image(path).getpixel((0, 0)) == (1, 2, 3)


@pytest.mark.parametrize("route", ROUTES)
def test_exif_orientation_is_applied_by_every_route(tmp_path, route):
    image = Image.new("RGB", (60, 20), (255, 255, 255))
    ImageDraw.Draw(image).rectangle((0, 0, 19, 19), fill=(255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter clockwise: the left end goes up
    data = encoded(image, "JPEG", quality=95, exif=exif)
    read = ImageTextDataset(route(data, tmp_path))[0]["image"]
    assert read.size == (20, 60)
    assert np.abs(np.array(read.getpixel((10, 5))) - (255, 0, 0)).max() < 10
    assert np.abs(np.array(read.getpixel((10, 55))) - 255).max() < 10


def segment(marker, content):
    return b"\xff" + bytes([marker]) + (len(content) + 2).to_bytes(2, "big") + content


def with_broken_xmp(image):
    data = encoded(image, "JPEG")
    return data[:2] + segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta a='\xa8'/>") + data[2:]


def with_broken_resolution(image):
    """Orientation 6, and an XResolution of 1/0 in the same directory."""
    orientation = b"\x01\x12\x00\x03\x00\x00\x00\x01\x00\x06\x00\x00"
    resolution = b"\x01\x1a\x00\x05\x00\x00\x00\x01\x00\x00\x00\x26"
    directory = b"\x00\x02" + orientation + resolution + bytes(4) + b"\x00\x00\x00\x01" + bytes(4)
    data = encoded(image, "JPEG")
    return data[:2] + segment(0xE1, b"Exif\0\0MM\x00\x2a\x00\x00\x00\x08" + directory) + data[2:]


@pytest.mark.parametrize("broken", [with_broken_xmp, with_broken_resolution])
def test_files_with_broken_metadata_are_read(broken):
    good = encoded(Image.new("RGB", (16, 16), (10, 200, 10)), "JPEG")
    images = [good, good, broken(Image.new("RGB", (16, 8), (10, 200, 10))), good]
    read = [pair["image"] for pair in ImageTextDataset([{"image": image, "caption": "a"} for image in images])]
    assert len(read) == 4
    assert np.abs(np.array(read[2].getpixel((3, 3))) - (10, 200, 10)).max() < 10
    assert read[2].size == ((16, 8) if broken is with_broken_xmp else (8, 16))


def test_a_broken_tag_costs_the_orientation_only(monkeypatch, caplog):
    def broken(image):
        raise ValueError("bad tag")

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", broken)
    assert read_image(encoded(Image.new("RGB", (6, 3)), "JPEG")).size == (6, 3)
    assert "bad tag" in caplog.text


def test_sixteen_bit_greys_keep_their_upper_byte():
    data = encoded(Image.fromarray(np.full((4, 4), 0x80FF, np.uint16)))
    assert read_image(data).getpixel((1, 1)) == (0x80,) * 3
    dark = encoded(Image.fromarray(np.full((4, 4), 0x00FF, np.uint16)))
    assert read_image(dark).getpixel((1, 1)) == (0, 0, 0)


@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 100, 3), (1, 1000, 3), (1000, 1, 3), (3, 3, 3)])
@pytest.mark.parametrize("as_array", [False, True])
def test_thin_pictures_keep_their_channels(shape, as_array):
    array = np.empty(shape, np.uint8)
    array[:] = (200, 100, 50)
    picture = array if as_array else Image.fromarray(array)
    pixels = ImageTextCollator(tiny_processor("clip"))([{"image": picture, "caption": "a"}])["pixel_values"][0]
    # Where a thin picture does not fill the crop, CLIP's processor pads with black: look at the middle.
    assert pixels[:, 16, 16].tolist() == [200, 100, 50]


def test_float_pixels_equal_their_byte_twins_or_are_refused():
    bytes_ = np.arange(48, dtype=np.uint8).reshape(4, 4, 3) * 5
    assert np.array_equal(read_image(bytes_.astype(np.float32) / 255), bytes_)
    with pytest.raises(UnreadableImageError, match=r"0 to 1"):
        read_image(bytes_.astype(np.float32))
    with pytest.raises(UnreadableImageError, match="values from nan"):
        read_image(np.full((4, 4, 3), np.nan, np.float32))


def test_channels_first_arrays_are_understood_where_nothing_else_is_possible():
    array = np.zeros((3, 20, 30), np.uint8)
    array[1] = 9
    assert read_image(array).size == (30, 20)
    with pytest.raises(UnreadableImageError, match=r"\(5, 6, 7\)"):
        read_image(np.zeros((5, 6, 7), np.uint8))


def good_jpeg():
    return encoded(Image.effect_noise((64, 64), 50).convert("RGB"), "JPEG")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (good_jpeg()[: len(good_jpeg()) // 2], "truncated"),
        (b"", "0 bytes"),
        (b"<html><body>404</body></html>", "not an image"),
        (encoded(Image.new("1", (20000, 20000))), "exceeds limit"),
    ],
)
def test_unreadable_files_name_path_and_reason(tmp_path, data, reason):
    limit = Image.MAX_IMAGE_PIXELS
    path = tmp_path / "bad.jpg"
    path.write_bytes(data)
    with pytest.raises(UnreadableImageError, match=rf"bad\.jpg.*{reason}"):
        read_image(path)
    with pytest.raises(UnreadableImageError, match=reason):
        read_image(data)
    assert limit == Image.MAX_IMAGE_PIXELS


def test_missing_files_and_values_are_unreadable(tmp_path):
    for source, reason in (
        (tmp_path / "gone.png", "no such file"),
        (tmp_path, "is a folder"),
        (None, "missing"),
        ({"bytes": None, "path": None}, "missing"),
        ({"bytes": None, "path": str(tmp_path / "moved.png")}, r"moved\.png"),
    ):
        with pytest.raises(UnreadableImageError, match=reason):
            read_image(source)
