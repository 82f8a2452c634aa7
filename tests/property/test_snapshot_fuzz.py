"""Whatever the bytes of a file, opening and verifying it gives a state or a SnapshotError, soon and in little memory."""

import gzip
import json
import random
import struct
import tracemalloc
from array import array
from copy import deepcopy
from pathlib import Path

import pytest

from segue.base.config import EngineConfig
from segue.base.errors import SnapshotError
from segue.base.types import SamplingParams
from segue.engine import EngineCore
from segue.kv.layout import KVLayout
from segue.state.codec import DIGEST_BYTES, MAGIC, MAX_HEADER_BYTES, chunk_digest, encode
from segue.state.snapshot import Progress, Snapshot
from segue.state.store import SavedState, save
from tests.fakes import FakeExecutor

NUM_FILES = 10_000
PARAMS = SamplingParams(temperature=0.7, logit_bias={3: 1.5}, seed=1, stop=("end",), logprobs=1)
PROGRESS = Progress(PARAMS, 5, 3, ((-0.5, 1, ((8, -0.5),)), (-2.0, 4, ((1, -0.1),))))
LAYOUT = KVLayout("float16", (2, 2, 1, 4))
SNAPSHOTS = [
    Snapshot("finished", "model", LAYOUT, array("i", range(10)), 9, 4, 1e9, note={"messages": ["hello"]}),
    Snapshot("running", "model", LAYOUT, array("i", range(30, 38)), 7, 3, 1e9, job="task", progress=PROGRESS),
    Snapshot("without-kv", "model", LAYOUT, array("i", [7]), 0, 4, 1e9),
]


def saved_bytes(folder: Path) -> list[bytes]:
    rng = random.Random(1)
    found = []
    for snapshot in SNAPSHOTS:

        def fill(index: int, out: memoryview) -> None:
            out[:] = rng.randbytes(len(out))

        save(folder / "good.segue", snapshot, fill)
        found.append((folder / "good.segue").read_bytes())
    return found


def put(path: Path, data: bytes) -> None:
    path.touch()
    with path.open("r+b", buffering=0) as file:  # a file that was made anew is flushed when closed, and that takes long
        file.write(data)
        file.truncate()


def opens(path: Path, data: bytes) -> bool:
    """Whether this is a state. Anything but SnapshotError fails the test."""
    put(path, data)
    try:
        with SavedState.open(path) as saved:
            saved.verify()
    except SnapshotError as error:
        assert str(error).startswith(str(path))
        return False
    return True


# Damage: what disks, transfers and people do to a file.


def flip(rng, data):
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(rng, data):
    start, size = rng.randrange(len(data)), rng.choice([1, 4, 16, 100])
    data[start : start + size] = rng.choice([rng.randbytes, bytes])(len(data[start : start + size]))


def cut(rng, data):
    del data[rng.randrange(len(data)) :]


def extend(rng, data):
    data += rng.choice([b"\0", b"\n", rng.randbytes(rng.randrange(1, 200)), bytes(data)])


def remove(rng, data):
    start = rng.randrange(len(data))
    del data[start : start + rng.randrange(1, 40)]


def insert(rng, data):
    start = rng.randrange(len(data))
    data[start:start] = rng.choice([b"\r", rng.randbytes(rng.randrange(1, 40)), data[start : start + 30]])


def move(rng, data):
    start, size = rng.randrange(len(data)), rng.randrange(1, 80)
    piece = data[start : start + size]
    del data[start : start + size]
    place = rng.randrange(len(data) + 1)
    data[place:place] = piece


def set_number(rng, data):
    """A length or a count, at its extremes."""
    value = rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, MAX_HEADER_BYTES, len(data)])
    struct.pack_into("<I", data, rng.choice([8, 12, rng.randrange(len(data) - 4)]), value)


def as_text(rng, data):
    data[:] = data.replace(b"\r\n", b"\n") if rng.random() < 0.5 else data.decode("latin-1").encode()


DAMAGE = [flip, overwrite, cut, extend, remove, insert, move, set_number, as_text]


def foreign(rng: random.Random) -> bytes:
    """Files of other kinds, and beginnings of ours."""
    header, _ = parts_of(SNAPSHOTS[0])
    tensors = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    return rng.choice(
        [
            b"",
            rng.randbytes(rng.randrange(1, 2000)),
            bytes(rng.randrange(1, 2000)),
            b"Dear diary,\n" * rng.randrange(1, 50),
            struct.pack("<Q", len(tensors)) + tensors + bytes(16),
            gzip.compress(rng.randbytes(100)),
            b"\x89PNG\r\n\x1a\n" + rng.randbytes(100),
            b"GGUF" + rng.randbytes(100),
            MAGIC[: rng.randrange(len(MAGIC) + 1)],
            MAGIC + struct.pack("<II", 1, rng.randrange(2**32)) + rng.randbytes(rng.randrange(500)),
            signed(rng.choice([b"{}", b"[]", b"0", rng.randbytes(100)]), [bytes(64)]),
            signed(json.dumps({**header, "num_tokens": 2 ** rng.randrange(5, 63)}).encode(), [bytes(64)]),
            signed(
                json.dumps({**header, "num_computed": 2 ** rng.randrange(4, 63)}).encode(), [bytes(40), b"", bytes(64)]
            ),
        ]
    )


def bad_file(rng: random.Random, good: list[bytes]) -> bytes:
    whole = rng.choice(good)
    data = bytearray(whole)
    for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 3])):
        if len(data) > 4:
            rng.choice(DAMAGE)(rng, data)
    return bytes(data) if data != whole else foreign(rng)


class Blank(FakeExecutor):
    """Has the layout of the files here, and keeps what is written."""

    kv_layout = LAYOUT

    def write_kv(self, blocks, start, stop, data, first, last):
        assert len(data) == (stop - start) * LAYOUT.token_bytes


def test_ten_thousand_damaged_and_foreign_files_are_refused_and_the_engine_does_not_change(tmp_path):
    rng, good = random.Random(0), saved_bytes(tmp_path)
    bad = [bad_file(rng, good) for _ in range(NUM_FILES)]
    engine = EngineCore(Blank(16, 4), EngineConfig(16, 4), model_fingerprint="model")
    engine.generate([1, 2, 3], SamplingParams(max_tokens=2, temperature=0), hold=True, request_id="finished")
    before = engine.stats()
    path = tmp_path / "bad.segue"
    tracemalloc.start()
    try:
        for number, data in enumerate(bad):
            put(path, data)
            with pytest.raises(SnapshotError):
                engine.load(path)
                pytest.fail(f"file {number} was taken for a state")
            assert engine.stats() == before
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    engine.check()
    for data in good:
        put(path, data)
        assert engine.load(path).num_held in (0, 7, 9)


def test_every_single_flipped_bit_is_found(tmp_path):
    data = bytearray(saved_bytes(tmp_path)[1])
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            assert not opens(tmp_path / "bad.segue", data), f"bit {bit} of byte {position}"
            data[position] ^= 1 << bit
    assert opens(tmp_path / "good.segue", data)


# Forgery: digests that fit what somebody made up.


def signed(header: bytes, parts: list[bytes]) -> bytes:
    """A file of this header, these sections and these chunks."""
    digest, data = b"", b""
    for section in (MAGIC + struct.pack("<II", 1, len(header)) + header, *parts[:2]):
        digest = chunk_digest(digest, 0, section)
        data += section + digest
    return data + b"".join(chunk + chunk_digest(digest, index, chunk) for index, chunk in enumerate(parts[2:]))


def parts_of(snapshot: Snapshot) -> tuple[dict, list[bytes]]:
    """Its header, and its sections and chunks without their digests; chunks are all zeros."""
    data = encode(snapshot)
    start = 16 + struct.unpack_from("<I", data, 12)[0]
    middle = start + DIGEST_BYTES + len(snapshot.tokens) * 4
    sections = [data[start + DIGEST_BYTES : middle], data[middle + DIGEST_BYTES : -DIGEST_BYTES]]
    return json.loads(data[16:start]), sections + [bytes(snapshot.chunk_bytes(i)) for i in range(snapshot.num_chunks)]


def places(value: object) -> list[tuple[list | dict, str | int]]:
    """Every place in a JSON value that could hold something else."""
    steps = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [(value, key) for key, _ in steps] + [place for _, inner in steps for place in places(inner)]


ODD = [
    None,
    True,
    -1,
    0,
    1,
    2,
    5,
    1.5,
    -0.0,
    1e308,
    2**31,
    2**53,
    2**64,
    10**300,
    "",
    "x",
    "\ud800",
    [],
    {},
    [[]],
    [1, 2],
]


def test_headers_with_odd_values_are_refused_or_make_sense(tmp_path):
    rng, opened = random.Random(0), 0
    for _ in range(3_000):
        header, parts = parts_of(SNAPSHOTS[1])
        for _ in range(rng.choice([1, 1, 2, 4])):
            place, key = rng.choice(places(header))
            action = rng.random()
            if action < 0.8:
                place[key] = deepcopy(rng.choice(ODD))
            elif action < 0.9:
                del place[key]
            else:
                place.update({"odd": 1}) if isinstance(place, dict) else place.append(deepcopy(rng.choice(ODD)))
        opened += opens(tmp_path / "a.segue", signed(json.dumps(header).encode(), parts))
    assert 0 < opened < 1_500  # an odd id, or an odd temperature, is a good one


def test_headers_with_damaged_text_are_refused_or_make_sense(tmp_path):
    rng, opened = random.Random(0), 0
    for _ in range(3_000):
        header, parts = parts_of(SNAPSHOTS[1])
        text = bytearray(json.dumps(header).encode())
        rng.choice([flip, overwrite, cut, remove, insert, move])(rng, text)
        opened += opens(tmp_path / "a.segue", signed(bytes(text), parts))
    assert 0 < opened < 1_500


BOMBS = {
    "open brackets": "[" * MAX_HEADER_BYTES,
    "deep lists": '{"note":' + "[" * 2_000_000 + "]" * 2_000_000 + "}",
    "deep objects": '{"note":' * 400_000 + "0" + "}" * 400_000,
    "many lists": "[" + "[]," * 1_390_000 + "[]]",
    "many objects": "[" + "{}," * 1_390_000 + "{}]",
    "many keys": "{" + ",".join(f'"{number}":0' for number in range(350_000)) + "}",
    "one key again and again": "{" + '"a":0,' * 690_000 + '"a":0}',
    "a long number": "9" * 4_000_000,
    "a long fraction": "0." + "9" * 4_000_000,
    "a large exponent": "1e" + "9" * 4_000_000,
    "a long text": '"' + "x" * 4_000_000 + '"',
    "many escapes": '"' + "\\u0000" * 690_000 + '"',
    "blanks": " " * MAX_HEADER_BYTES,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_header_made_to_explode_does_not(tmp_path, name):
    """As all of the header, and as the note in one that is otherwise good, where some are large but right."""
    header, parts = parts_of(SNAPSHOTS[1])
    note = json.dumps({**header, "note": "@"}).replace('"@"', '{"x":' + BOMBS[name][: MAX_HEADER_BYTES - 2_000] + "}")
    assert not opens(tmp_path / "a.segue", signed(BOMBS[name].encode(), parts))
    opens(tmp_path / "a.segue", signed(note.encode(), parts))
