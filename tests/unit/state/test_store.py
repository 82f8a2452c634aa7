import os
import random
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.base.errors import InvalidRequest, SnapshotError, UnknownState
from segue.base.types import SamplingParams
from segue.kv.layout import KVLayout
from segue.state.codec import DIGEST_BYTES, encode
from segue.state.snapshot import Progress, Snapshot
from segue.state.store import STALE_SECONDS, SavedState, StateStore, save

PROGRESS = Progress(SamplingParams(logprobs=1), 7, 1, ((-0.5, 1, ((2, -0.5),)),))


def snapshot(num_computed=100, chunk_tokens=16, token_bytes=24, **fields):
    tokens = array("i", range(num_computed + 1))
    layout = KVLayout("uint8", (token_bytes,))
    return Snapshot("state-1", "model", layout, tokens, num_computed, chunk_tokens, 1e9, **fields)


def kv_of(state, seed=0):
    """The state's KV: one run of bytes that differ from chunk to chunk, and from seed to seed."""
    return random.Random(seed).randbytes(state.kv_bytes)


def filler(state, seed=0):
    kv, size = kv_of(state, seed), state.layout.token_bytes

    def fill(index, out):
        start, stop = state.chunk(index)
        out[:] = kv[start * size : stop * size]

    return fill


def taken(path):
    """The snapshot and the KV that a file holds; each chunk must come once."""
    chunks = {}
    with SavedState.open(path) as saved:
        saved.take(lambda index, data: chunks.setdefault(index, []).append(bytes(data)))
        assert sorted(chunks) == list(range(saved.snapshot.num_chunks))
        return saved.snapshot, b"".join(data for _, [data] in sorted(chunks.items()))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.segue"


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """No test ends with a thread or an open file more than it began with."""
    threads, files = set(threading.enumerate()), os.listdir("/proc/self/fd")
    yield
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= len(files)


@given(st.integers(0, 80), st.integers(1, 100), st.integers(1, 300), st.sampled_from([None, PROGRESS]))
def test_a_state_comes_back_with_its_kv(num_computed, chunk_tokens, token_bytes, progress):
    state = snapshot(num_computed, chunk_tokens, token_bytes, progress=progress if num_computed else None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.segue")
        size = save(path, state, filler(state))
        assert taken(path) == (state, kv_of(state))
        with SavedState.open(path) as saved:
            assert saved.size_bytes == size == path.stat().st_size
        assert os.listdir(folder) == ["a.segue"]


def test_a_state_can_be_read_twice_and_large_chunks_pass(path):
    state = snapshot(900, chunk_tokens=400, token_bytes=4099)  # 1.6 MiB a chunk, at odd places in the file
    save(path, state, filler(state))
    assert taken(path) == (state, kv_of(state))
    with SavedState.open(path) as saved:
        saved.verify()
        saved.verify()


def test_saving_again_replaces_the_old_state_in_one_step(path):
    state = snapshot()
    save(path, state, filler(state))
    with SavedState.open(path) as old:
        save(path, replace(state, id="state-2"), filler(state, seed=1))
        old.verify()  # whoever has it open keeps what was there
        assert old.snapshot == state
    assert taken(path) == (replace(state, id="state-2"), kv_of(state, seed=1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# Damage. The fuzz test in tests/property has all the rest.


def chunk_slices(state):
    """Where each chunk, with its digest, lies in the file."""
    start = len(encode(state))
    stride = state.chunk_bytes(0) + DIGEST_BYTES
    sizes = [state.chunk_bytes(index) + DIGEST_BYTES for index in range(state.num_chunks)]
    return [slice(start + index * stride, start + index * stride + size) for index, size in enumerate(sizes)]


def test_a_wrong_size_is_found_before_any_chunk_is_read(path):
    state = snapshot()
    save(path, state, filler(state))
    whole = path.read_bytes()
    assert len(whole) == chunk_slices(state)[-1].stop
    for data in (whole[:-1], whole[: chunk_slices(state)[3].stop], whole + b"\0", whole + whole):
        path.write_bytes(data)
        with pytest.raises(SnapshotError, match=r"a\.segue: .* bytes"):
            SavedState.open(path)


def test_chunks_in_each_others_places_are_found(path):
    state = snapshot()
    save(path, state, filler(state))
    data = bytearray(path.read_bytes())
    first, second, *_ = chunk_slices(state)
    data[first], data[second] = data[second], data[first]
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match="chunk 0"):
        taken(path)


def test_a_chunk_of_another_snapshot_is_found(path):
    """Same place, same size, its own digest intact: only what it is bound to differs."""
    state = snapshot()
    save(path, replace(state, id="state-2"), filler(state, seed=1))
    other = path.read_bytes()
    save(path, state, filler(state))
    data = bytearray(path.read_bytes())
    place = chunk_slices(state)[2]
    data[place] = other[place]
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match="chunk 2"):
        taken(path)


def test_a_damaged_chunk_is_never_handed_out(path):
    state = snapshot()
    save(path, state, filler(state))
    data = bytearray(path.read_bytes())
    data[chunk_slices(state)[3].start + 5] ^= 1
    path.write_bytes(data)
    seen = []
    with SavedState.open(path) as saved, pytest.raises(SnapshotError, match=r"a\.segue: .* chunk 3"):
        saved.take(lambda index, out: seen.append(index))
    assert {0, 1, 2} <= {*seen} and 3 not in seen  # the other thread may be ahead


def test_a_file_that_shrinks_while_it_is_read_is_an_error(path):
    state = snapshot()
    save(path, state, filler(state))
    with SavedState.open(path) as saved:
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(SnapshotError, match="cut short"):
            saved.verify()


def test_what_the_user_of_a_chunk_raises_passes_through(path):
    state = snapshot()
    save(path, state, filler(state))
    with SavedState.open(path) as saved, pytest.raises(ZeroDivisionError):
        saved.take(lambda index, data: 1 / (index - 3))


def test_only_files_are_opened_and_nothing_is_waited_for(tmp_path):
    with pytest.raises(UnknownState):
        SavedState.open(tmp_path / "none.segue")
    os.mkfifo(tmp_path / "pipe.segue")
    for path in (tmp_path, tmp_path / "pipe.segue", Path("/dev/zero"), Path("/proc/self/stat"), Path("a\0b")):
        with pytest.raises(SnapshotError):
            SavedState.open(path)


# Saves that fail: the old state stays, and nothing else.


def failing(error, at=3):
    def fill(index, out):
        out[:] = bytes(len(out))
        if index == at:
            raise error

    return fill


def interrupted(index, out):
    if index == 3:
        signal.raise_signal(signal.SIGINT)
    out[:] = bytes(len(out))


@pytest.fixture
def heeding_interrupts():
    """A shell starts what runs in its background with this signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(
    ("fill", "expected"),
    [(failing(ValueError()), ValueError), (failing(SystemExit()), SystemExit), (interrupted, KeyboardInterrupt)],
)
def test_after_an_error_or_an_interrupt_the_old_state_is_there_and_nothing_else(
    path, fill, expected, old, heeding_interrupts
):
    state = snapshot()
    if old:
        save(path, state, filler(state))
    with pytest.raises(expected):
        save(path, replace(state, id="state-2"), fill)
    assert os.listdir(path.parent) == (["a.segue"] if old else [])
    if old:
        assert taken(path) == (state, kv_of(state))


def test_a_full_disk_is_an_error_that_says_so_and_ends_the_save_early(path):
    state = snapshot(1000, chunk_tokens=10, token_bytes=1000)
    save(path, state, filler(state))
    filled = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(SnapshotError, match=r"a\.segue cannot be written: File too large"):
            save(path, state, lambda index, out: filled.append(index))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(filled) < 40
    assert os.listdir(path.parent) == ["a.segue"]
    assert taken(path) == (state, kv_of(state))


def test_a_folder_that_is_not_there_or_a_name_that_is_taken_is_an_error(tmp_path):
    state = snapshot()
    (tmp_path / "folder.segue").mkdir()
    for path in (
        tmp_path / "none" / "a.segue",
        tmp_path / "folder.segue",
        tmp_path / ("x" * 300),
        Path("/"),
        Path("a\0b"),
    ):
        with pytest.raises(SnapshotError, match="cannot be written"):
            save(path, state, filler(state))
    assert os.listdir(tmp_path) == ["folder.segue"]


def test_a_snapshot_that_cannot_be_written_leaves_the_old_one(path):
    state = snapshot()
    save(path, state, filler(state))
    with pytest.raises(SnapshotError):
        save(path, replace(state, note={"x": {1}}), filler(state))
    assert taken(path) == (state, kv_of(state))


def test_what_a_dead_save_left_is_removed_after_an_hour(path):
    def leftover(name, age):
        file = path.with_name(name)
        file.write_bytes(b"x")
        os.utime(file, (time.time() - age, time.time() - age))
        return name

    old, new = STALE_SECONDS + 60, STALE_SECONDS - 60
    leftover(".a.segue.0123abcd.saving", old)
    kept = {
        leftover(".a.segue.89abcdef.saving", new),
        leftover(".b.segue.0123abcd.saving", old),
        leftover(".a.segue.x.0123abcd.saving", old),
        leftover(".a.segue.txt", old),
    }
    state = snapshot()
    save(path, state, filler(state))
    assert set(os.listdir(path.parent)) == kept | {"a.segue"}


SAVER = """
import os, sys
from array import array
from pathlib import Path
from segue.kv.layout import KVLayout
from segue.state.snapshot import Snapshot
from segue.state.store import save

path, version = Path(sys.argv[1]), int(sys.argv[2])
def fill(index, out):
    out[:] = bytes([version % 256]) * len(out)
while True:
    layout, tokens, note = KVLayout("uint8", (100,)), array("i", range(4000)), {"version": version}
    os.write(1, b"begun %d\\n" % version)
    save(path, Snapshot("a", "model", layout, tokens, len(tokens), 40, 1e9, note=note), fill)
    os.write(1, b"done %d\\n" % version)
    version += 1
"""


def test_a_save_that_is_killed_leaves_the_old_state_or_the_new_one(tmp_path):
    store = StateStore(tmp_path)
    rng, version = random.Random(0), 0
    state = snapshot(note={"version": 0})
    save(store.path("a"), state, filler(state))
    for _ in range(25):
        command = [sys.executable, "-c", SAVER, store.path("a"), str(version + 1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as saver:
            first = saver.stdout.readline()
            time.sleep(rng.uniform(0, 0.03))
            saver.kill()
            lines = [line.split() for line in (first + saver.stdout.read()).splitlines()]
        old = [int(number) for word, number in lines if word == "done"] or [version]
        new = [int(number) for word, number in lines if word == "begun"]
        found, kv = taken(store.path("a"))
        version = found.note["version"]
        assert version in (old[-1], new[-1])
        assert kv == (bytes([version % 256]) * found.kv_bytes if version else kv_of(state))
        assert [info.snapshot for info in store.list()] == [found]
    assert len(os.listdir(tmp_path)) > 1, "no kill came in the middle of a save"


# States by name.


def test_a_store_lists_what_is_in_it_good_and_bad_and_nothing_else(tmp_path):
    store = StateStore(tmp_path / "new" / "states")
    assert list(store.list()) == []
    state = snapshot()
    for name in ("b", "a.1-x_Y", "damaged"):
        store.save(name, replace(state, id=name), filler(state))
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    store.path("damaged").write_bytes(b"text")
    (store.folder / "folder.segue").mkdir()
    os.mkfifo(store.folder / "pipe.segue")
    (store.folder / "link.segue").symlink_to("nowhere")
    for name in (
        "notes.txt",
        ".a.segue.0123abcd.saving",
        ".segue",
        ".hidden.segue",
        "a b.segue",
        "a.segue.segue",
        "é.segue",
    ):
        (store.folder / name).write_bytes(b"x")
    good, also_good, bad = sorted(store.list(), key=lambda info: info.error is not None)
    assert [(info.name, info.snapshot.id) for info in (good, also_good)] == [("a.1-x_Y", "a.1-x_Y"), ("b", "b")]
    assert (good.path, good.size_bytes) == (store.path("a.1-x_Y"), store.path("a.1-x_Y").stat().st_size)
    assert (bad.name, bad.snapshot, bad.size_bytes) == ("damaged", None, 4)
    assert "damaged.segue" in bad.error


def test_a_state_is_opened_and_removed_by_name(tmp_path):
    store = StateStore(tmp_path)
    state = snapshot()
    store.save("a", state, filler(state))
    with store.open("a") as saved:
        assert saved.snapshot == state
    store.remove("a")
    for use in (store.remove, store.open):
        with pytest.raises(UnknownState):
            use("a")


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "a/b", "../a", "a b", "a\n", "é", "a\0", "x" * 129, "a.segue"])
def test_a_name_cannot_leave_the_folder(tmp_path, name):
    store = StateStore(tmp_path)
    for use in (store.path, store.open, store.remove):
        with pytest.raises(InvalidRequest, match="name"):
            use(name)
