"""Segments on disk under faults: what comes back is what was written, or nothing."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from quire.features.tiers import disk
from quire.features.tiers.disk import DiskStore
from quire.types.errors import ConfigError

SIZE = 300
FAULTS = 500


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def name(number: int) -> bytes:
    return number.to_bytes(32, "little")


def put(store: DiskStore, number: int) -> bool:
    return store.put(name(number), number.to_bytes(16, "little"), memoryview(content(number)))[0]


def get(store: DiskStore, number: int) -> bytes | None:
    into = bytearray(SIZE)
    tag = store.get(name(number), memoryview(into))
    assert tag is None or tag == number.to_bytes(16, "little")
    return None if tag is None else bytes(into)


def segments(path: Path) -> list[Path]:
    return sorted(path.glob("*/lane-*/*.kv"))


def test_records_come_back_and_are_found_by_the_next_process(tmp_path: Path):
    store = DiskStore(tmp_path, "model", 1 << 20)
    assert all(put(store, i) for i in range(20)) and put(store, 3)
    assert [get(store, i) for i in range(20)] == [content(i) for i in range(20)]
    assert get(store, 99) is None
    store.close()
    store = DiskStore(tmp_path, "model", 1 << 20)
    assert sorted(store.names) == sorted(name(i) for i in range(20))
    assert [get(store, i) for i in range(20)] == [content(i) for i in range(20)]
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "secret", *segments(tmp_path)))
    store.clear()
    assert not store.names and not segments(tmp_path) and put(store, 1)
    store.close()


def test_a_removed_record_stays_away_and_those_after_it_stay(tmp_path: Path):
    for first in (True, False):
        store = DiskStore(tmp_path, "model", 1 << 20)
        if first:
            assert all(put(store, i) for i in range(5))
            store.remove(name(0))
            store.remove(name(2))
            store.remove(name(77))
        assert [get(store, i) for i in range(5)] == [None, content(1), None, content(3), content(4)]
        store.close()
    store = DiskStore(tmp_path, "model", 1 << 20)
    assert put(store, 2) and get(store, 2) == content(2)
    store.close()


def test_bytes_are_bounded_and_the_segment_goes_that_was_used_longest_ago(tmp_path: Path):
    limit = 40 * (SIZE + disk.HEADER_BYTES)
    store = DiskStore(tmp_path, "model", limit)
    removed: list[bytes] = []
    for i in range(200):
        assert get(store, 0) is not None or i == 0
        done, gone = store.put(name(i), bytes(16), memoryview(content(i))) if i else (put(store, 0), [])
        removed += gone
        assert done and sum(path.stat().st_size for path in segments(tmp_path)) <= limit
    assert set(removed).isdisjoint(store.names) and len(removed) + len(store.names) == 200
    assert len(store.names) > 20
    store.close()
    smaller = DiskStore(tmp_path, "model", limit // 2)
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= limit // 2
    smaller.close()


def test_faults_of_every_kind_give_no_wrong_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Flipped bits, truncation, stale and swapped records, zeros, and writes that fail at any byte."""
    rng = random.Random(0)
    store, known, lost, found = DiskStore(tmp_path, "model", 400 * SIZE), set[int](), 0, 0
    real = os.pwritev
    for fault in range(FAULTS):
        kind = rng.choice(("flip", "truncate", "swap", "zero", "enospc", "partial", "restart", "none"))
        number = rng.randrange(5000)
        if kind in ("enospc", "partial"):
            cut = rng.randrange(SIZE) if kind == "partial" else 0

            def failing(file, parts, position, cut=cut):
                if cut:
                    real(file, [b"".join(parts)[:cut]], position)
                raise OSError(errno.ENOSPC, "No space left on device")

            monkeypatch.setattr(os, "pwritev", failing)
            assert not put(store, 10_000 + fault)
            monkeypatch.setattr(os, "pwritev", real)
            store._pause_until = 0.0
        if put(store, number):
            known.add(number)
        path = rng.choice([path for path in segments(tmp_path) if path.stat().st_size])
        data = bytearray(path.read_bytes())
        if kind == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == "zero":
            at = rng.randrange(len(data))
            data[at : at + 50] = bytes(len(data[at : at + 50]))
        elif kind == "swap" and len(data) >= SIZE + disk.HEADER_BYTES:
            record, other = (rng.randrange(len(data) // (SIZE + disk.HEADER_BYTES)) for _ in range(2))
            a, b = (slice(i * (SIZE + disk.HEADER_BYTES), (i + 1) * (SIZE + disk.HEADER_BYTES)) for i in (record, other))
            data[a], data[b] = data[b], data[a]
        if kind in ("flip", "zero", "swap"):
            path.write_bytes(data)
        elif kind == "truncate":
            os.truncate(path, rng.randrange(len(data)))
            store.close()
            store = DiskStore(tmp_path, "model", 400 * SIZE)
        elif kind == "restart":
            store.close()
            store = DiskStore(tmp_path, "model", 400 * SIZE)
        for asked in (number, *rng.sample(sorted(known), min(3, len(known)))):
            there = get(store, asked)
            assert there in (None, content(asked)), f"fault {fault}, {kind}"
            found, lost = found + (there is not None), lost + (there is None)
    assert found > FAULTS and lost > 0
    store.close()
    store = DiskStore(tmp_path, "model", 1 << 20)
    store.clear()
    left = [path for path in segments(tmp_path) if not path.read_bytes().startswith(disk.MAGIC)]
    assert segments(tmp_path) == left, "only files whose first bytes were changed look like those of others"
    assert {path.name for path in tmp_path.iterdir()} == {"secret", "model"}
    store.close()


def test_a_kill_in_the_middle_of_writing_loses_at_most_the_last_record(tmp_path: Path):
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from test_disk_store import put
        from quire.features.tiers.disk import DiskStore
        store = DiskStore(Path(sys.argv[1]), "model", 1 << 26)
        for i in range(10**6):
            assert put(store, i)
            print(i, flush=True)
    """)
    for last in (0, 50, 200):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / str(last)), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        written = next(int(line) for line in child.stdout if int(line) >= last)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        store = DiskStore(tmp_path / str(last), "model", 1 << 26)
        assert [get(store, i) for i in range(written + 1)] == [content(i) for i in range(written + 1)]
        store.close()


def test_stores_side_by_side_have_lanes_and_other_models_see_nothing(tmp_path: Path):
    first, second = DiskStore(tmp_path, "model", 1 << 20), DiskStore(tmp_path, "model", 1 << 20)
    assert put(first, 1) and put(second, 2)
    assert (get(first, 2), get(second, 1)) == (None, None)
    other = DiskStore(tmp_path, "another model", 1 << 20)
    assert not other.names
    for store in (first, second, other):
        store.close()
    again = DiskStore(tmp_path, "model", 1 << 20)
    assert again.names == [name(1)]
    again.close()


def test_a_store_with_another_secret_finds_nothing(tmp_path: Path):
    store = DiskStore(tmp_path, "model", 1 << 20)
    assert put(store, 1)
    store.close()
    (tmp_path / "secret").unlink()
    store = DiskStore(tmp_path, "model", 1 << 20)
    assert not store.names and get(store, 1) is None and put(store, 1)
    store.close()


def test_foreign_files_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    lane = tmp_path / "model" / "lane-0"
    lane.mkdir(parents=True)
    (lane / "notes.txt").write_text("mine")
    (lane / "00000007.kv").write_bytes(b"not a segment" * 100)
    (lane / "00000009.kv").symlink_to("/etc/passwd")
    store = DiskStore(tmp_path, "model", 1 << 20)
    assert put(store, 1) and get(store, 1) == content(1)
    store.clear()
    store.close()
    assert (lane / "notes.txt").read_text() == "mine" and (lane / "00000007.kv").stat().st_size == 1300
    assert (lane / "00000009.kv").is_symlink() and "is ignored" in caplog.text


def test_a_full_disk_stops_writing_for_a_while_and_reading_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    now = [100.0]
    store = DiskStore(tmp_path, "model", 1 << 20, clock=lambda: now[0])
    assert put(store, 1)
    real = os.pwritev

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    assert not put(store, 2) and not put(store, 3) and get(store, 1) == content(1)
    monkeypatch.setattr(os, "pwritev", real)
    assert not put(store, 2), "it waits before it tries again"
    now[0] += disk.RETRY_S
    assert put(store, 2) and get(store, 2) == content(2)
    assert caplog.text.count("No space left") == 1
    store.close()


def test_records_of_another_model_or_rank_under_the_same_secret_are_not_read(tmp_path: Path):
    for fingerprint in ("model", "other"):
        store = DiskStore(tmp_path, fingerprint, 1 << 20)
        assert all(put(store, i) for i in range(3))
        store.close()
    [own, other] = [next((tmp_path / fingerprint).glob("lane-0/*.kv")) for fingerprint in ("model", "other")]
    store = DiskStore(tmp_path, "model", 1 << 20)
    own.write_bytes(other.read_bytes())  # the names and lengths of their records are equal
    assert [get(store, i) for i in range(3)] == [None] * 3
    store.close()
    own.write_bytes(other.read_bytes())
    store = DiskStore(tmp_path, "model", 1 << 20)
    assert not store.names
    store.close()


def test_a_deleted_directory_that_another_engine_made_again_is_left_alone(tmp_path: Path):
    path, length = tmp_path / "kv", SIZE + disk.HEADER_BYTES
    store = DiskStore(path, "model", 16 * length)
    assert put(store, 1)
    shutil.rmtree(path)
    other = DiskStore(path, "model", 16 * length)
    assert put(other, 1)
    assert not any(put(store, i) for i in range(2, 40))
    store.clear()
    store.close()
    assert get(other, 1) == content(1) and len(segments(path)) == 1
    other.close()


def test_a_directory_that_is_deleted_costs_only_what_comes_after(tmp_path: Path):
    now = [0.0]
    store = DiskStore(tmp_path / "kv", "model", 16 * 1000, clock=lambda: now[0])
    assert put(store, 1)
    for path in sorted((tmp_path / "kv").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert get(store, 1) == content(1), "the file is open"
    assert not all(put(store, i) for i in range(2, 9))
    assert get(store, 1) == content(1)
    store.close()


@pytest.mark.parametrize("kind", ["file", "read-only", "another user"])
def test_a_path_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    path = tmp_path / "kv"
    if kind == "file":
        path.write_text("")
    elif kind == "read-only":
        path.mkdir()
        monkeypatch.setattr(os, "access", lambda *_: False)
    else:
        path.mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match=r"kv_disk_path:? .*kv (cannot be used|belongs to user)"):
        DiskStore(path, "model", 1 << 20)
