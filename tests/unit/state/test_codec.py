import io
import json
import struct
import tracemalloc
from array import array
from base64 import b64decode
from dataclasses import replace
from zlib import decompress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.base.errors import SnapshotError
from segue.base.types import MAX_SEED, SamplingParams
from segue.kv.layout import ITEM_BYTES, KVLayout
from segue.state.codec import DIGEST_BYTES, MAGIC, MAX_HEADER_BYTES, VERSION, chunk_digest, encode, read_preamble
from segue.state.snapshot import Progress, Snapshot

# Every field of the parameters, at values a JSON writer gets wrong first.
PARAMS = SamplingParams(
    temperature=0.1 + 0.2,
    top_k=2**40,
    top_p=5e-324,
    min_p=1e-17,
    repetition_penalty=1.1,
    presence_penalty=-0.0,
    frequency_penalty=-2,
    logit_bias={5: 1 / 3, 0: -100.0},
    seed=MAX_SEED,
    n=1,
    max_tokens=None,
    min_tokens=2**33,
    stop=("é\u2028", '"\\\n', "\x00"),
    stop_token_ids=(7, 0),
    ignore_eos=True,
    include_stop=True,
    logprobs=2,
)
LOGPROBS = ((-0.1, 1, ((3, -0.1), (9, float("-inf")))), (-1 / 3, 40_000, ()))
FINISHED = Snapshot(
    "state-1", "f00d", KVLayout("bfloat16", (2, 2, 1, 4)), array("i", [1, 2, 2**31 - 1, 0]), 3, 2, 1.75e9
)
RUNNING = replace(
    FINISHED, job="task", progress=Progress(PARAMS, 2**62 + 1, 2, LOGPROBS), note={"messages": [{"é": None}]}
)

texts = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False)
notes = st.dictionaries(
    texts,
    st.recursive(
        st.none() | st.booleans() | st.integers() | numbers | texts,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
        max_leaves=12,
    ),
    max_size=4,
)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(1e-300, 1),
    logit_bias=st.dictionaries(st.integers(0, 2**40), st.floats(-100, 100), max_size=4),
    seed=st.none() | st.integers(0, MAX_SEED),
    max_tokens=st.none() | st.integers(5, 2**70),
    stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 2**31), max_size=3),
    logprobs=st.none() | st.integers(0, 100),
)


@st.composite
def snapshots(draw):
    tokens = array("i", draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)))
    num_prompt = draw(st.integers(1, len(tokens)))
    pairs = st.tuples(st.integers(0, 2**31 - 1), st.floats(allow_nan=False))
    entry = st.tuples(st.floats(allow_nan=False), st.integers(0, 2**31 - 1), st.lists(pairs, max_size=3).map(tuple))
    logprobs = st.lists(entry, max_size=len(tokens) - num_prompt).map(tuple)
    progress = st.builds(Progress, params, st.integers(0, MAX_SEED), st.just(num_prompt), logprobs)
    layout = st.builds(
        KVLayout, st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(1, 3), min_size=1, max_size=8).map(tuple)
    )
    return Snapshot(
        id=draw(texts),
        model=draw(texts),
        layout=draw(layout),
        tokens=tokens,
        num_computed=draw(st.integers(0, len(tokens))),
        chunk_tokens=draw(st.integers(1, 50)),
        created_at=draw(numbers),
        scope=draw(texts),
        adapter=draw(texts),
        job=draw(st.none() | texts),
        progress=draw(st.none() | progress),
        note=draw(notes),
    )


class Dribble(io.BytesIO):
    """A stream that gives one byte at a time, as a slow connection may."""

    def read(self, size=-1, /):
        return super().read(min(size, 1))


def read(data, **limits):
    return read_preamble(io.BytesIO(data), **{"available": len(data), **limits})


def forge(header, sections=(), version=VERSION):
    """A preamble that no writer of ours made, with digests that fit."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    digest, data = b"", b""
    for section in (MAGIC + struct.pack("<II", version, len(text)) + text, *sections):
        digest = chunk_digest(digest, 0, section)
        data += section + digest
    return data


def header_of(snapshot):
    data = encode(snapshot)
    return json.loads(data[16 : 16 + struct.unpack_from("<I", data, 12)[0]])


def sections_of(snapshot):
    """The bytes after the header, without their digests."""
    data = encode(snapshot)
    start = 16 + struct.unpack_from("<I", data, 12)[0] + DIGEST_BYTES
    middle = start + len(snapshot.tokens) * 4
    return data[start:middle], data[middle + DIGEST_BYTES : -DIGEST_BYTES]


@given(snapshots())
def test_what_is_written_reads_back_equal_whole_or_in_drips(snapshot):
    data = encode(snapshot)
    for stream, available in ((io.BytesIO(data + b"chunks"), len(data) + 6), (Dribble(data + b"chunks"), None)):
        preamble = read_preamble(stream, available=available, max_tokens=len(snapshot.tokens))
        assert preamble.snapshot == snapshot
        assert repr(preamble.snapshot.progress) == repr(snapshot.progress)  # -0.0, and int against float
        assert (preamble.size_bytes, preamble.digest) == (len(data), data[-DIGEST_BYTES:])
        assert stream.tell() == len(data)


def test_the_hard_values_are_among_those_that_read_back():
    assert repr(read(encode(RUNNING)).snapshot) == repr(RUNNING)


@given(snapshots(), st.data())
def test_every_cut_is_found(snapshot, data):
    encoded = encode(snapshot)
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    for available in (len(cut), len(encoded), None):
        with pytest.raises(SnapshotError):
            read(cut, available=available)
    with pytest.raises(SnapshotError, match="cut short"):
        read(encoded, available=len(cut))


VERSION_1 = (
    "eNpdUjuP00AQNlDdSddAgYSg2YpiE9ZvO6KAigK601WJZW3iSc7E9hp7LV2IQhASBYjqChDoKiqguZriOHQUiB9AQYWgo0H8gzCbJcfBSKud+X"
    "Ye38zso80bWxvrF9ZPGYbx8bRhTEmakA6pJZfQMgkluUggQ2TIWIJmPRAloIkqT3gpodLGbdFHRfJ6jMagAgxPYi5Jx/RdpqXNKMn4RDSITkki"
    "J8tE/WEmuDQ9lXubK6hrUYua1IlmlBRNHksxhqImHUebA5GXDWYnHRsrbTfF+NjDoqSsxKiCulYlSl7xfKlJyEuouGwqzM/aNvtXMLMUZTxGti"
    "wMXdP0LN/3PY2WpONCy7bQKU8LZZo4GZ+SCkqQqUwFglDwTE7wqW0qDlBDMYC/cGvZ/LCCOw0+TE48IOVMjFIZ91OOVLtdlyK//ySiXUZbphph"
    "FOGcQHUfWpZt+xazvcB1fN8NGHIqkALy5DvHMymaLNPMV0jgBmFoO26ItWvsEKuSD6+/33+FK+iRXq9XKKVRgyGRdtGxcZooij5lCKejQlQQg0"
    "BIVg0gUgyyJoFY59QY9oYb6avdzFbEHQ8HHHjMDBzLtwM/ZK7eLHrmpVyuUZknYlcfofyTqBAS1F5z3DQfgWI1xR50t7NoNjv6+vPTPj24PD33"
    "5ez5Nxfn6nvj7zYWi8UcL2P/yfWHR7vv7+bvrj7Yfbr348VzJW8Pt5by+VD5X9vTMWfwrOFZ+RhL+bXYXJvfuvdt++VN8uzSxsGVx78Bk+AKNA"
    "=="
)  # base64 of zlib of `encode(RUNNING)`


def test_what_version_1_wrote_can_still_be_read():
    assert repr(read(decompress(b64decode(VERSION_1))).snapshot) == repr(RUNNING)


def test_a_newer_version_is_told_apart_from_damage():
    with pytest.raises(SnapshotError, match="newer version"):
        read(forge({}, version=VERSION + 1))
    with pytest.raises(SnapshotError, match="damaged"):
        read(forge({}, version=0))


@pytest.mark.parametrize("text", ["", "hello", "x" * 100, MAGIC.replace(b"\r\n", b"\n").decode("latin-1") + "y" * 100])
def test_what_is_no_snapshot_is_called_so(text):
    with pytest.raises(SnapshotError, match=r"not a saved state|cut short"):
        read(text.encode("latin-1"))


HUGE = [2**31, 2**40, 2**63, 10**400]
WRONG = {
    "id": [None, 3, ["x"]],
    "job": [3, [], {}],
    "created_at": [None, "now", True, 10**400, []],
    "layout": [None, [], {"dtype": "bfloat16"}, {"dtype": "bfloat16", "shape": [1], "order": "C"}],
    "layout.dtype": [None, "float64", "", ["float32"], {}],
    "layout.shape": [
        None,
        [],
        [0],
        [-1],
        [1.0],
        [True],
        ["2"],
        [1] * 9,
        [2**31],
        [2**30, 2**30],
        [2**20] * 8,
        {"0": 1},
    ],
    "num_tokens": [None, 0, -1, 3, 5, 4.0, True, "4", *HUGE],
    "num_computed": [None, -1, 5, 3.0, False, *HUGE],
    "chunk_tokens": [None, 0, -1, 2.0, True, *HUGE],
    "note": [None, [], "text", 3],
    "progress": [[], 3, {}, "no"],
    "progress.params": [None, {"temperature": 1.0, "magic": 1}],
    "progress.seed": [None, -1, 1.5, MAX_SEED + 1, True],
    "progress.num_prompt": [None, -1, 0, 5, 1.0, *HUGE],
    "progress.num_logprobs": [None, -1, 1, 3, *HUGE],
    "progress.num_tops": [None, -1, 1, 3, *HUGE],
    "progress.params.temperature": [None, -1, "1", True, 10**400],
    "progress.params.top_p": [0, 1.5],
    "progress.params.logit_bias": [
        None,
        {},
        {"5": 1.0},
        [5],
        [[5]],
        [["5", 1.0]],
        [[5, 1.0], [5, 1.0]],
        [[5.0, 1.0]],
        [[[], 1]],
    ],
    "progress.params.seed": [-1, 2**63, 0.5],
    "progress.params.max_tokens": [0, 1.5, "16"],
    "progress.params.stop": [None, "text", [""], [3], {}],
    "progress.params.stop_token_ids": [None, [-1], [1.0], [[]], "12"],
    "progress.params.ignore_eos": [None, 0, "false"],
    "progress.params.logprobs": [-1, 101],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_header_whose_digest_fits_is_checked_field_by_field(field, value):
    header = header_of(RUNNING)
    sections = tuple(bytes(section) for section in sections_of(RUNNING))
    assert read(forge(header, sections)).snapshot == RUNNING
    *path, name = field.split(".")
    place = header
    for step in path:
        place = place[step]
    place[name] = value
    with pytest.raises(SnapshotError, match=r"not valid|cut short|damaged"):
        read(forge(header, sections))
    del place[name]
    if "params" not in path:  # those may be missing: an older version knew fewer
        with pytest.raises(SnapshotError, match=name):
            read(forge(header, sections))


def test_a_parameter_that_an_older_version_did_not_know_has_its_default():
    header = header_of(RUNNING)
    del header["progress"]["params"]["min_p"], header["progress"]["params"]["stop"]
    found = read(forge(header, sections_of(RUNNING))).snapshot.progress.params
    assert found == replace(PARAMS, min_p=0.0, stop=())


@pytest.mark.parametrize(
    "note",
    [
        b"NaN",
        b"[Infinity]",
        b"1e999",
        b'{"a":1,"a":1}',
        b'"\\ud800"',
        b'{"\\udfff":1}',
        b'"\xff"',
        b"9" * 5000,
        b"[" * 65 + b"]" * 65,
        b"[" * 1_000_000,
        b'{"a":' * 600_000,
        b"[" * 500_000 + b"]" * 500_000,
        b"1} {",
        b"",
    ],
)
def test_json_that_is_not_plain_is_refused(note):
    header = json.dumps({**header_of(FINISHED), "note": "@"}).encode()
    plain = array("i", FINISHED.tokens).tobytes()
    assert read(forge(header.replace(b'"@"', b"{}"), [plain])).snapshot == FINISHED
    with pytest.raises(SnapshotError, match="not plain JSON"):
        read(forge(header.replace(b'"@"', b'{"x":' + note + b"}"), [plain]))


def test_ids_and_log_probabilities_are_checked_though_their_digests_fit():
    header = header_of(RUNNING)
    tokens, logprobs = sections_of(RUNNING)
    nan, minus_one = struct.pack("<d", float("nan")), struct.pack("<i", -1)
    wrong = [
        (minus_one + tokens[4:], logprobs),
        (tokens, nan + logprobs[8:]),
        (tokens, logprobs[:-8] + nan),
        (tokens, logprobs[:16] + minus_one + logprobs[20:]),  # a rank
        (tokens, logprobs[:24] + b"\x01" + logprobs[25:]),  # how many tops the first has
        (tokens, logprobs[:28] + minus_one + logprobs[32:]),  # a top's token
    ]
    for sections in wrong:
        with pytest.raises(SnapshotError, match="not valid"):
            read(forge(header, sections))


@pytest.mark.parametrize(("name", "count"), [("num_tokens", 2**26), ("num_tokens", 2**40), ("num_computed", 2**26)])
@pytest.mark.parametrize("available", [None, 2000])
def test_a_huge_count_costs_no_memory(tmp_path, name, count, available):
    """From a file: its `read` makes room for all that it is asked for."""
    (tmp_path / "forged").write_bytes(forge({**header_of(FINISHED), "num_tokens": 2**26, name: count}) + bytes(1000))
    tracemalloc.start()
    try:
        with (tmp_path / "forged").open("rb", buffering=0) as file, pytest.raises(SnapshotError):
            read_preamble(file, available=available)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20  # one read's worth at most
    finally:
        tracemalloc.stop()


def test_more_tokens_than_are_taken_are_refused():
    with pytest.raises(SnapshotError, match="up to 3"):
        read(encode(FINISHED), max_tokens=3)


cyclic = {}
cyclic["self"] = cyclic
deep = []
for _ in range(70):
    deep = [deep]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": array("i")},
        {"tokens": array("i", [1, 2, 3, -1])},
        {"tokens": array("q", [1, 2, 3, 2**31])},
        {"num_computed": 5},
        {"num_computed": -1},
        {"chunk_tokens": 0},
        {"layout": KVLayout("float32", ())},
        {"layout": KVLayout("float32", (2**29,))},
        {"created_at": float("nan")},
        {"id": "\ud800"},
        {"progress": Progress(PARAMS, -1, 2)},
        {"progress": Progress(PARAMS, 0, 2, ((0.0, 1, ()),) * 3)},
        {"progress": Progress(PARAMS, 0, 2, ((float("nan"), 1, ()),))},
        *(
            {"note": {"x": value}}
            for value in ((1, 2), {1: 2}, {3}, b"x", float("inf"), deep, cyclic, 10**5000, "\udfff")
        ),
        {"note": {"x": "y" * MAX_HEADER_BYTES}},
    ],
)
def test_what_would_not_read_back_is_not_written(change):
    with pytest.raises(SnapshotError):
        encode(replace(FINISHED, **change))
