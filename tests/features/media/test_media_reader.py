"""Media processes, the cache of processed items and its files in shared memory."""

import asyncio
import base64
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen

import numpy as np
import pytest
from media_files import READER, encoded, hostile, picture, reading, truncated, unusual
from media_models import MediaCase, clip
from PIL import Image

from patience import wait_for
from quire.features.media import reader as reader_module
from quire.features.media.inputs import NO_OPTIONS, MediaOptions, MediaRef, Pixels, read_multi_modal
from quire.features.media.store import PREFIX, SharedFiles, sweep
from quire.features.media.workers import worker
from quire.text.workers.pool import current_tenant
from quire.types.errors import InvalidParameter, NotSupported, RequestError

IMAGE = (READER / "pictures" / "00.png").read_bytes()


@pytest.fixture(scope="module")
def media():
    with reading() as made:
        yield made


def refs(*contents, uuid=None):
    return [MediaRef("image", f"messages[0].content[{i}]", content, uuid) for i, content in enumerate(contents)]


def read(media, *contents, options=NO_OPTIONS, uuid=None):
    return media.run(media.reader.process(refs(*contents, uuid=uuid), options))


def values(array):
    data = array.data
    if array.path:
        with open(array.path, "rb") as file:  # noqa: PTH123
            data = file.read()[array.offset :]
    return np.frombuffer(data, array.dtype, count=int(np.prod(array.shape))).reshape(array.shape)


def files_of(media):
    return {path.name for path in media.reader._files.directory.iterdir()} - {"owner", "source"}


def complete(media, text, *contents, ids=None):
    work = media.reader.complete(text, ids, refs(*contents), NO_OPTIONS, media.encode, True, "prompt")
    return media.run(work)


def test_items_are_those_of_transformers(media):
    from transformers import AutoImageProcessor

    image = Image.open(READER / "pictures" / "00.png").convert("RGB")
    expected = AutoImageProcessor.from_pretrained(READER, backend="pil")(images=[image], return_tensors="np")
    [item] = read(media, IMAGE)
    [array] = item.arrays
    assert (array.name, array.shape) == ("pixel_values", (1, 3, 32, 32)) and array.path
    assert np.array_equal(values(array), expected["pixel_values"])
    prompt = json.loads((READER / "expected_png.json").read_text())[0]["prompt"]
    ids, [placed] = complete(media, "<image>?", IMAGE)
    assert ids == prompt and (placed.start, placed.length, placed.digest) == (1, 16, item.digest)
    assert complete(media, None, IMAGE, ids=[10, 12, 13])[0] == prompt


def test_the_content_is_what_counts(media):
    """A picture has one digest, however it is sent, and another one than any other picture."""
    image = picture(32, 32, seed=1)
    pixels = Pixels((32, 32, 3), image.tobytes())
    url = "data:image/png;base64," + base64.b64encode(encoded(image)).decode()
    items = read(media, encoded(image), url, pixels, encoded(image, "BMP"))
    assert len({item.digest for item in items}) == 1
    others = read(media, *(encoded(picture(32, 32, seed=seed)) for seed in range(2, 10)))
    assert len({item.digest for item in (*items, *others)}) == 9
    [resized] = read(media, encoded(image), options=MediaOptions({"do_resize": False}))
    assert resized.digest not in {item.digest for item in items}


def test_equal_pictures_are_processed_once(media, monkeypatch):
    processed = []
    monkeypatch.setattr(media.reader, "on_processed", processed.append)
    image, hits = encoded(picture(seed=20)), media.reader.cache.hits

    async def ask():
        return await asyncio.gather(*(media.reader.process(refs(image), NO_OPTIONS) for _ in range(20)))

    assert len({item.digest for [item] in media.run(ask())}) == 1 and len(processed) == 1
    read(media, image)
    assert len(processed) == 1 and media.reader.cache.hits == hits + 1


def test_others_get_an_item_whose_first_caller_has_gone(media):
    image = encoded(picture(seed=21))

    async def ask():
        first = asyncio.create_task(media.reader.process(refs(image), NO_OPTIONS))
        second = asyncio.create_task(media.reader.process(refs(image), NO_OPTIONS))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert len(media.run(ask())) == 1 and not media.reader._running


def test_files_live_as_long_as_the_cache_or_an_item(media):
    [item] = read(media, encoded(picture(seed=22)))
    path = Path(item.arrays[0].path)
    media.reader.cache.clear()
    assert path.exists()
    array = item.arrays[0]
    del item
    assert path.exists() and values(array).shape == (1, 3, 32, 32)
    del array
    assert not path.exists() and not files_of(media)


def test_the_cache_forgets_what_was_used_longest_ago(media, monkeypatch):
    media.reader.cache.clear()
    size = read(media, IMAGE)[0].bytes
    monkeypatch.setattr(media.reader.cache, "_most", 3 * size)
    pictures = [encoded(picture(seed=seed)) for seed in range(30, 33)]
    for image in pictures:
        read(media, image)
    hits = media.reader.cache.hits
    read(media, pictures[0])
    assert media.reader.cache.hits == hits + 1 and media.reader.cache.bytes == 3 * size and len(files_of(media)) == 3
    read(media, IMAGE)  # it was forgotten
    read(media, pictures[0])
    assert media.reader.cache.hits == hits + 2
    monkeypatch.setattr(media.reader.cache, "_most", 0)
    media.reader.cache.clear()
    read(media, IMAGE)
    assert not files_of(media)


def test_without_room_in_shared_memory_arrays_are_sent(tmp_path, monkeypatch):
    arrays = {"a": np.arange(6, dtype=np.float64).reshape(2, 3), "b": np.array([[1, 2]], np.int32), "c": np.array([True])}
    for name in ("file", "other"):
        (tmp_path / name).touch()
    places, in_file = worker.write_arrays(arrays, str(tmp_path / "file"))
    assert in_file and [(one.dtype, one.offset) for one in places] == [("float32", 0), ("int64", 24), ("bool", 40)]
    assert (tmp_path / "file").stat().st_size == 41
    _, in_file = worker.write_arrays(arrays, str(tmp_path / "gone"))
    assert not in_file and not (tmp_path / "gone").exists()  # its owner has removed it
    monkeypatch.setattr(worker, "SHARED_SPARE_BYTES", 1 << 60)
    places, in_file = worker.write_arrays(arrays, str(tmp_path / "other"))
    assert not in_file and not (tmp_path / "other").stat().st_size
    assert np.array_equal(np.frombuffer(places[0].data, places[0].dtype).reshape(2, 3), arrays["a"])


def test_a_uuid_names_an_earlier_picture_of_the_same_tenant(media):
    [item] = read(media, IMAGE, uuid="mine")
    assert read(media, None, uuid="mine") == [item]
    [other] = read(media, encoded(picture(seed=40)), uuid="mine")
    assert read(media, None, uuid="mine") == [other] != [item]  # what is sent counts, not its name
    with pytest.raises(InvalidParameter, match=r"messages\[0\].content\[0\]: no image or video with this uuid"):
        read(media, None, uuid="another")
    token = current_tenant.set("somebody else")
    try:
        with pytest.raises(InvalidParameter, match="uuid"):
            read(media, None, uuid="mine")
    finally:
        current_tenant.reset(token)


def test_a_uuid_names_earlier_frames_of_a_video(tmp_path):
    film = clip(4, 33, 40)
    case = MediaCase("qwen2.5-vl", tmp_path)
    with reading(model=str(case.directory)) as made:

        def shown(video):
            given = read_multi_modal({"video": video}, {"video": "film"})
            return made.run(made.reader.process(given, NO_OPTIONS))

        [slow], [again] = shown((film, {"fps": 0.5})), shown(None)
        assert again is slow
        [fast], [again] = shown((film, {"fps": 2.0})), shown(None)
        assert again is fast and fast.interval < slow.interval


def test_hostile_pictures_are_refused_and_the_process_lives(media):
    read(media, IMAGE)
    pids = media.reader.pids
    files = [*hostile().values(), *(data for form in ("PNG", "JPEG", "WEBP") for data in truncated(form))]
    for data in files:
        begun = time.process_time()
        try:
            read(media, data)
        except RequestError as error:
            assert str(error).startswith("messages[0].content[0]: ") and "/" not in str(error).replace("wait/read", "")
        assert time.process_time() - begun < 2
    for data in unusual().values():
        assert read(media, data)[0].tokens == (12,) * 16
    assert set(pids) <= set(media.reader.pids)
    media.reader.cache.clear()
    wait_for(lambda: gc.collect() >= 0 and not files_of(media))


def test_a_lost_process_is_replaced_and_its_job_done_again(media):
    read(media, IMAGE)
    [worker_pid, *_] = media.reader._pool.pids

    async def ask():
        asked = [media.reader.process(refs(encoded(picture(900, 900, seed=seed))), NO_OPTIONS) for seed in range(50, 56)]
        gathered = asyncio.gather(*asked)
        await asyncio.sleep(0.02)
        os.kill(worker_pid, signal.SIGKILL)
        return await gathered

    assert len(media.run(ask())) == 6
    assert worker_pid not in media.reader.pids


def test_a_checkpoint_without_an_image_processor_is_refused_at_the_first_picture(tmp_path):
    for path in READER.iterdir():
        if path.suffix != ".json" or path.name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            (tmp_path / path.name).symlink_to(path)
    with reading(model=str(tmp_path)) as made:
        for _ in range(2):
            with pytest.raises(NotSupported, match=r"image processor or tokenizer cannot be loaded \(OSError"):
                read(made, IMAGE)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64,@@@@", "base64"),
        ("data:image/png,abc", "data:image/TYPE;base64"),
        ("data:text/plain;base64,AAAA", "type image/"),
        ("data:image/svg+xml;base64,AAAA", "SVG"),
        ("data:image/png;base64,ä", "base64"),
        ("gopher://x", "must begin with"),
        ("nothing", "must begin with"),
        ("http://[::1", "URL is not valid"),
        ("file:///etc/passwd", "--allowed-local-media-path"),
        ("https://example.com/a.png", "--allowed-media-domains"),
        ("https://\ud800/a.png", "URL is not valid"),
    ],
)
def test_urls_that_are_refused(media, url, reason):
    with pytest.raises(RequestError, match=reason) as refused:
        read(media, url)
    assert "etc" not in str(refused.value) and "example" not in str(refused.value)


def test_options_of_the_processor(media):
    with pytest.raises(InvalidParameter, match="mm_processor_kwargs"):
        read(media, IMAGE, options=MediaOptions({"size": {"height": 64, "width": 64}}))
    with pytest.raises(InvalidParameter, match="mm_processor_kwargs"):
        read(media, IMAGE, options=MediaOptions({"size": "large"}))


def test_pixels_that_are_not_rescaled_are_numbers_for_the_encoder(media):
    pixels = [values(read(media, IMAGE, options=MediaOptions(options))[0].arrays[0]) for options in NOT_RESCALED]
    assert pixels[0].dtype == pixels[1].dtype == np.float32 and pixels[0].max() > 200
    np.testing.assert_array_equal(*pixels)


NOT_RESCALED = ({"do_rescale": False, "do_normalize": False}, {"rescale_factor": 1.0, "do_normalize": False})


@pytest.mark.parametrize("options", [{"rescale_factor": 1e300}, {"rescale_factor": -1e6}, {"rescale_factor": 1e30}])
def test_options_that_make_pixels_too_large_are_refused(media, options):
    with pytest.raises(InvalidParameter, match=r"messages\[0\].content\[0\]: mm_processor_kwargs make pixels") as refused:
        read(media, IMAGE, options=MediaOptions(options))
    assert refused.value.parameter == "mm_processor_kwargs"


def test_placeholders_and_items_must_be_as_many(media):
    for text, count in (("?", 1), ("<image><image>", 1), ("<image>", 2)):
        with pytest.raises(InvalidParameter, match="<image>"):
            complete(media, text, *[IMAGE] * count)
    ids, items = complete(media, "<image>1<image>", IMAGE, encoded(picture(seed=60)))
    assert ids == [10, *[12] * 16, 1, *[12] * 16] and [item.start for item in items] == [1, 18]
    placeholders = media.reader.placeholders
    with pytest.raises(InvalidParameter, match=r"messages\[1\].content has <image>"):
        placeholders.refuse_typed([("messages[0].content", "a"), ("messages[1].content", "b <image> c")])
    with pytest.raises(InvalidParameter, match="no image or video comes with it"):
        placeholders.refuse_in((10, 12, 13))
    placeholders.refuse_in((10, 13))


def test_more_items_than_allowed_are_refused():
    with reading(limit_mm_per_prompt={"image": 2}) as made:
        made.reader.check(refs(IMAGE, IMAGE))
        with pytest.raises(InvalidParameter, match=r"at most 2 images, got 3 \(limit_mm_per_prompt\)"):
            made.reader.check(refs(IMAGE, IMAGE, IMAGE))
        with pytest.raises(NotSupported, match="video"):
            made.reader.check([MediaRef("video", "messages[0].content[0]", b"")])
    none = {"image": 0, "video": 0}
    with reading(limit_mm_per_prompt=none) as made, pytest.raises(NotSupported, match="limit_mm"):
        made.reader.check(refs(IMAGE))


def test_missing_packages_are_named(media, monkeypatch):
    monkeypatch.setattr(reader_module, "find_spec", lambda name: None)
    with pytest.raises(NotSupported, match=r"transformers and Pillow: pip install 'quire\[vision\]'"):
        media.reader.check(refs(IMAGE))


def test_data_of_offline_prompts():
    image = picture(4, 2)
    array = np.asarray(image)
    [one] = read_multi_modal({"image": image})
    assert one.content == Pixels((2, 4, 3), image.tobytes())
    rows_last = array.transpose(2, 0, 1)
    assert [ref.content for ref in read_multi_modal({"image": [array, image, rows_last]})] == [one.content] * 3
    assert [ref.uuid for ref in read_multi_modal({"image": [array, None]}, {"image": [None, "b"]})] == [None, "b"]
    video = np.stack([array, array])
    assert [ref.content.shape for ref in read_multi_modal({"video": [video, (video, {"fps": 2})]})] == [(2, 2, 4, 3)] * 2
    assert [ref.content.shape for ref in read_multi_modal({"video": [image, image, image]})] == [(3, 2, 4, 3)]
    for bad in (
        {"audio": 1},
        {"image": 3},
        {"image": array[0]},
        {"image": array.astype(float)},
        {"video": array},
        {"image": None},
    ):
        with pytest.raises(RequestError, match="multi_modal_data"):
            read_multi_modal(bad)
    with pytest.raises(RequestError, match=r"must be \[height, width, 3\] or \[3, height, width\] of uint8; got \[2, 4\]"):
        read_multi_modal({"image": array[:, :, 0]})
    with pytest.raises(InvalidParameter, match=r"multi_modal_uuids must have one name per item of .*; got 2 for 1"):
        read_multi_modal({"image": [image]}, {"image": ["a", "b"]})


READ_AND_WAIT = """
import sys
from media_files import READER, reading
from quire.features.media.inputs import NO_OPTIONS, MediaRef

with reading() as media:
    picture = (READER / "pictures" / "00.png").read_bytes()
    media.run(media.reader.process([MediaRef("image", "", picture)], NO_OPTIONS))
    print(media.reader._files.directory, *media.reader.pids, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, None])
def test_processes_and_files_end_with_the_server(number):
    command = [sys.executable, "-c", READ_AND_WAIT]
    paths = os.pathsep.join([*map(str, (Path(__file__).parent, Path(__file__).parents[2])), os.environ.get("PYTHONPATH", "")])
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}) as process:
        directory, *pids = process.stdout.readline().split()
        assert Path(directory).is_dir() and pids
        if number is not None:
            process.send_signal(number)
        else:
            process.stdin.close()
    gone = [Path(directory), *(Path("/proc", pid) for pid in pids)]
    wait_for(lambda: not any(path.exists() for path in gone))


def test_files_of_a_process_that_was_killed_are_swept(tmp_path):
    living, dead = SharedFiles(tmp_path), tmp_path / f"{PREFIX}dead"
    dead.mkdir()
    (dead / "owner").touch()
    (dead / "0").write_bytes(b"x")
    sweep(tmp_path)
    assert not dead.exists() and living.directory.exists()
    living.close()
    assert not living.directory.exists()
