"""Bundles: every token arrives, in order, first and last at once, and nothing of what was dropped."""

from hypothesis import given
from hypothesis import strategies as st

from segue.server.bundle import Bundle
from segue.server.messages import Part

steps = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.booleans(), st.integers(0, 12)), max_size=60)


@given(steps)
def test_what_arrives_is_what_was_added(steps):
    now = 0.0
    bundle = Bundle(0.01, lambda: now)
    added, arrived, ended, begun = {}, {}, set(), set()

    def receive(parts):
        for part in parts:
            arrived.setdefault((part.request_id, part.index), []).append(part)

    for number, (name, index, finish, milliseconds) in enumerate(steps):
        key = name, index
        if key in ended:
            continue
        now += milliseconds / 1000
        part = Part(name, index, [number], f"{number},", [(0.5, 1, [])], "stop" if finish else None)
        added.setdefault(key, []).append(number)
        bundle.add(part)
        due = bundle.take()
        if finish or key not in begun:
            assert number in [token for part in due for token in part.tokens]
        begun.add(key)
        if finish:
            ended.add(key)
        receive(due)
    receive(bundle.take(everything=True))
    assert bundle.take(everything=True) == []
    for key, numbers in added.items():
        parts = arrived[key]
        assert [token for part in parts for token in part.tokens] == numbers
        assert "".join(part.text for part in parts) == "".join(f"{number}," for number in numbers)
        assert sum(len(part.logprobs) for part in parts) == len(numbers)
        assert [part.finish for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert (parts[-1].finish is not None) == (key in ended)


def test_tokens_that_come_fast_travel_together_and_dropped_ones_do_not():
    now = 0.0
    bundle = Bundle(0.01, lambda: now)
    for number in range(10):
        bundle.add(Part("a", 0, [number], "", []))
        bundle.add(Part("b", 0, [number], "", []))
    assert [part.tokens for part in bundle.take()] == [[0], [0]]
    bundle.drop("b")
    assert bundle.take() == []
    now = 0.02
    assert [(part.request_id, part.tokens) for part in bundle.take()] == [("a", list(range(1, 10)))]
