"""Catalogues: what they allow is what their items say, however they were made, restricted, or written and read."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue import BeamParams, Catalogue, Engine, InvalidRequest, Request, SamplingParams, Then

LINES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple), min_size=1, max_size=40)


def prefix_free(lines):
    """Each line ends with a token that is nowhere else, so that none begins another."""
    return {f"item {number}": (*line, 9) for number, line in enumerate(lines)}


def children(walk, prefix):
    """The tokens that may follow, the way a search finds them."""
    catalogue = walk.catalogue
    nodes = catalogue.find(prefix)
    if nodes is None or (prefix and walk.denied is not None and nodes[-1] in walk.denied[len(prefix) - 1]):
        return set()
    if len(prefix) == catalogue.depth:
        return set()
    begin, end = 0, len(catalogue.levels[0])
    if nodes:
        level = catalogue.levels[len(nodes) - 1]
        begin, end = level.children[nodes[-1]], level.children[nodes[-1] + 1]
    level, denied = catalogue.levels[len(prefix)], walk.denied[len(prefix)] if walk.denied is not None else ()
    return {int(level.tokens[node]) for node in range(begin, end) if node not in denied}


def following(items, prefix):
    return {line[len(prefix)] for line in items.values() if len(line) > len(prefix) and line[: len(prefix)] == prefix}


def assert_allows(walk, items, every):
    for line in every.values():
        for at in range(len(line) + 1):
            assert children(walk, line[:at]) == following(items, line[:at])


@given(LINES, st.data())
def test_what_may_follow_is_what_an_item_has_there(lines, data):
    items = prefix_free(lines)
    catalogue = Catalogue(items)
    assert len(catalogue) == len(items)
    assert_allows(catalogue.restricted(None, ()), items, items)
    for name, line in items.items():
        assert catalogue.tokens(name) == line
        assert sorted(catalogue.names(line)) == sorted(other for other, same in items.items() if same == line)
        assert catalogue.names(line[:-1]) == ()
    denied = data.draw(st.lists(st.sampled_from(sorted(items)), unique=True))
    left = {name: line for name, line in items.items() if name not in denied}
    if any(line in left.values() for name, line in items.items() if name in denied):
        return  # its line is another item's too: the line stays
    if left:
        assert_allows(catalogue.restricted(None, denied), left, items)
    else:
        with pytest.raises(InvalidRequest, match="leaves no item"):
            catalogue.restricted(None, denied)
    allowed = data.draw(st.lists(st.sampled_from(sorted(items)), min_size=1, unique=True))
    chosen = {name: items[name] for name in allowed}
    assert_allows(catalogue.restricted(allowed, ()), chosen, chosen)


@given(LINES)
def test_a_compiled_file_is_the_same_catalogue(lines):
    import tempfile
    from pathlib import Path

    items = prefix_free(lines)
    with tempfile.TemporaryDirectory() as folder:
        Catalogue(items).write(Path(folder) / "items.bin")
        again = Catalogue.read(Path(folder) / "items.bin")
    assert len(again) == len(items)
    assert_allows(again.restricted(None, ()), items, items)
    assert {name: again.tokens(name) for name in items} == items


def test_json_and_csv(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"x": [1, 2], "ü": [1, 3, 4]}))
    (tmp_path / "a.csv").write_text("item,first,second,third\nx,1,2,\nü,1,3,4\n")
    for name in ("a.json", "a.csv"):
        catalogue = Catalogue.read(tmp_path / name)
        assert catalogue.tokens("x") == (1, 2) and catalogue.tokens("ü") == (1, 3, 4)
        assert catalogue.names((1, 3, 4)) == ("ü",)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.json", "[]", "object"),
        ("a.json", "{", "a.json"),
        ("a.json", "{}", "no items"),
        ("a.json", '{"x": []}', "list of token ids"),
        ("a.json", '{"x": [1, -2]}', "list of token ids"),
        ("a.json", '{"x": [true]}', "list of token ids"),
        ("a.json", '{"x": "12"}', "list of token ids"),
        ("a.json", '{"x": [1, 2], "y": [1, 2, 3]}', r"tokens \[1, 2\] begins another"),
        ("a.csv", "x,1\nx,2\n", "line 2: 'x' is there twice"),
        ("a.csv", "x,1\ny,two\n", "line 2"),
        ("a.bin", "what", "a.bin"),
        ("none.bin", None, "none.bin"),
    ],
)
def test_what_is_no_catalogue_is_refused(tmp_path, name, content, why):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidRequest, match=why):
        Catalogue.read(tmp_path / name)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "items.bin"
    Catalogue({f"item {n}": (n % 3, n % 5, n) for n in range(40)}).write(path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 11):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :])
        with pytest.raises(InvalidRequest):
            Catalogue.read(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidRequest):
        Catalogue.read(path)


def test_a_file_that_leads_astray_is_refused(tmp_path):
    """Its digest is right, and its arrays point elsewhere."""
    for name, value in (("0.children", 99), ("1.rows", -1), ("2.row_ends", 99), ("1.tokens", -5), ("order", 40)):
        catalogue = Catalogue({f"item {n}": (n % 3, n % 5, n) for n in range(40)})
        if name == "order":
            catalogue._order = catalogue._order.copy()
            catalogue._order[3] = value
        else:
            number, field = name.split(".")
            level = catalogue.levels[int(number)]
            changed = getattr(level, field).copy()
            changed[0 if value < 0 else -1] = value
            catalogue.levels[int(number)] = replace(level, **{field: changed})
        catalogue.write(tmp_path / "items.bin")
        with pytest.raises(InvalidRequest, match="damaged"):
            Catalogue.read(tmp_path / "items.bin")


def test_from_arrays_checks_their_shapes():
    with pytest.raises(InvalidRequest, match="names"):
        Catalogue.from_arrays(np.zeros((3, 2), np.int32), ["a"])
    with pytest.raises(InvalidRequest, match="two items"):
        Catalogue.from_arrays(np.array([[1, 2], [1, 3]], np.int32), ["a", "a"])
    assert Catalogue.from_arrays(np.array([[1, 2], [1, 3]], np.int32), ["a", "b"]).tokens("b") == (1, 3)


# In a search


@pytest.fixture(scope="module")
def engine():
    with Engine("tiny", num_blocks=300) as engine:
        yield engine


def found(engine, **options):
    return engine.generate(Request(list(range(60)), beam=BeamParams(**options)))[0].beams


def test_nothing_illegal_is_ever_found(engine):
    rng = np.random.default_rng(0)
    items = {str(number): tuple(rng.integers(0, 200, 3).tolist()) for number in range(300)}
    catalogue = Catalogue(items)
    for scoring in ("full", "legal"):
        for temperature in (0.0, 1.0):
            beams = found(engine, width=64, catalogue=catalogue, scoring=scoring, temperature=temperature, seed=1)
            assert len(beams) == 64
            for beam in beams:
                assert beam.items == tuple(name for name, line in items.items() if line == beam.token_ids)
    free = found(engine, width=64, max_tokens=3)
    assert any(beam.token_ids not in items.values() for beam in free)


def test_a_denied_item_makes_room_for_the_next(engine):
    items = {str(number): (number % 10, 20 + number // 10, 40) for number in range(100)}
    catalogue = Catalogue(items)
    ranking = [beam.items[0] for beam in found(engine, width=100, catalogue=catalogue)]
    assert sorted(ranking) == sorted(items)
    denied = tuple(ranking[:5])
    left = {name: line for name, line in items.items() if name not in denied}
    assert found(engine, width=20, catalogue=catalogue, deny=denied) == found(
        engine, width=20, catalogue=Catalogue(left)
    )
    few = tuple(ranking[10:14])
    assert [beam.items[0] for beam in found(engine, width=20, catalogue=catalogue, allow=few)] == list(few)


def test_items_with_the_same_tokens_are_denied_one_by_one(engine):
    catalogue = Catalogue({"a": (11, 40, 7), "b": (11, 40, 7), "c": (12, 3, 3)})
    assert {beam.items for beam in found(engine, catalogue=catalogue, deny=("a",))} == {("b",), ("c",)}
    assert {beam.items for beam in found(engine, catalogue=catalogue, deny=("a", "b"))} == {("c",)}
    for options, field in (({"deny": ("x",)}, "deny"), ({"allow": ("x",)}, "allow"), ({"allow": "ab"}, "allow")):
        with pytest.raises(InvalidRequest, match=f"^{field}: "):
            found(engine, catalogue=catalogue, **options)
    with pytest.raises(InvalidRequest, match="deny: the catalogue has no item 'x'"):
        found(engine, catalogue=catalogue, allow=("a",), deny=("x",))


def test_a_line_ends_where_its_item_does(engine):
    """Not at a stop token within it, and not before it is whole."""
    catalogue = Catalogue({"a": (257, 5, 6), "b": (257, 5, 7)})
    assert {beam.items for beam in found(engine, catalogue=catalogue, stop_token_ids=(257,))} == {("a",), ("b",)}
    with pytest.raises(InvalidRequest, match="max_tokens: 2 is less than the 3 tokens"):
        found(engine, catalogue=catalogue, max_tokens=2)


def test_a_stop_string_at_the_very_end_of_a_thought(engine):
    """However many tokens it might have had: it was stopped, and the stop is not repeated."""
    prompt, free = list(range(60)), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    thought = engine.generate(prompt, free)[0]
    stop = next(letter for letter in thought.text[2:] if letter.isascii() and letter.isprintable())
    beam = BeamParams(width=4, max_tokens=2)
    found = []
    first = engine.generate(prompt, replace(free, stop=(stop,)))[0]
    for most in (len(first.token_ids), 12):
        params = replace(free, max_tokens=most, stop=(stop,))
        result = engine.generate(Request(prompt, params, then=Then(beam, f"{stop}ab")))[0]
        assert result.completions[0].finish_reason == "stop" and result.token_ids == first.token_ids
        assert result.text == first.text
        after = result.state.tokens.tolist()[len(prompt) + len(result.token_ids) :][:2]
        assert bytes(after) == b"ab" and result.completions[0].search_prefilled == 3
        found.append([(line.token_ids, line.score) for line in result.beams])
    assert found[0] == found[1]


def test_by_name_and_replaced_while_it_runs(engine):
    engine.set_catalogue("things", Catalogue({"old": (1, 2, 3)}))
    request = engine.submit(Request([5, 6, 7], beam=BeamParams(catalogue="things")))
    engine.step()
    engine.set_catalogue("things", Catalogue({"new": (3, 4, 5)}))
    last = None
    while engine.has_work:
        last = (engine.step() or [last])[-1]
    assert last.request_id == request and [beam.items for beam in last.beams] == [("old",)]
    assert found(engine, catalogue="things")[0].items == ("new",)
    engine.set_catalogue("things", None)
    with pytest.raises(InvalidRequest, match="'things' is not known"):
        found(engine, catalogue="things")
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        found(engine, catalogue=Catalogue({"far": (10**6,)}))


def test_allowed_tokens_alone(engine):
    allowed = (3, 50, 77, 120)
    for scoring in ("full", "legal"):
        beams = found(engine, width=16, max_tokens=2, allowed_token_ids=allowed, scoring=scoring)
        assert len(beams) == 16 and {token for beam in beams for token in beam.token_ids} <= set(allowed)
    total = sum(np.exp(beam.logprob) for beam in beams)
    assert total == pytest.approx(1.0, abs=1e-4)  # sixteen lines are all there are


def test_drawn_lines_belong_to_their_seed_and_follow_the_distribution(engine):
    options = {"width": 1, "max_tokens": 1, "allowed_token_ids": (3, 50, 77, 120), "scoring": "legal"}
    exact = {beam.token_ids: np.exp(beam.logprob) for beam in found(engine, **{**options, "width": 4})}
    counts = dict.fromkeys(exact, 0)
    for seed in range(400):
        counts[found(engine, **options, temperature=1.0, seed=seed)[0].token_ids] += 1
    for line, share in exact.items():
        assert counts[line] / 400 == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / 400) + 0.01)
    wide = {"width": 8, "max_tokens": 4, "temperature": 1.5}
    assert found(engine, **wide, seed=7) == found(engine, **wide, seed=7)
    assert found(engine, **wide, seed=7) != found(engine, **wide, seed=8)
    best = found(engine, width=8, max_tokens=4)
    assert found(engine, **{**wide, "temperature": 1e-4}, seed=7) == best
