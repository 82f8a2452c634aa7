from hypothesis import given
from hypothesis import strategies as st

from segue.engine.text import StopStrings

TEXT = st.text("ab", max_size=12)


@given(
    st.lists(TEXT, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.booleans()
)
def test_cutting_as_text_comes_equals_cutting_the_whole(pieces, stops, include):
    stream = StopStrings(stops, include)
    got = ""
    for piece in pieces:
        got += stream.push(piece)
        if stream.found:
            break
    whole = "".join(pieces)
    hits = [(whole.find(stop), len(stop)) for stop in stops if stop in whole]
    if not hits:
        assert not stream.found and got + stream.flush() == whole
        return
    # The first stop string to be complete as text comes wins, at the earliest place it could be seen.
    ends = [at + length for at, length in hits]
    assert stream.found
    seen = next(len("".join(pieces[: i + 1])) for i in range(len(pieces)) if len("".join(pieces[: i + 1])) >= min(ends))
    at, length = min((whole[:seen].find(stop), len(stop)) for stop in stops if stop in whole[:seen])
    assert got == whole[: at + length if include else at]
