from hypothesis import given
from hypothesis import strategies as st

from segue.kv.pool import BlockPool


@given(st.lists(st.tuples(st.sampled_from("arx"), st.integers(0, 20)), max_size=80), st.integers(2, 20))
def test_the_free_list_behaves_like_a_plain_list(actions, num_blocks):
    pool = BlockPool(num_blocks)
    free = list(range(1, num_blocks))
    held: dict[int, int] = {}
    for action, number in actions:
        if action == "a" and number <= len(free):
            assert pool.allocate(number) == free[:number]
            held.update(dict.fromkeys(free[:number], 1))
            del free[:number]
        elif action == "r" and 1 <= number < num_blocks:
            pool.retain([number])
            held[number] = held.get(number, 0) + 1
            if number in free:
                free.remove(number)
        elif action == "x" and held:
            some = list(held)[: number + 1]
            pool.release(some)
            for block in reversed(some):
                held[block] -= 1
                if not held[block]:
                    del held[block]
                    free.append(block)
        assert pool.free_blocks() == free
        assert pool.num_free == len(free)
        assert [pool.ref_count[b] for b in range(num_blocks)] == [held.get(b, 0) for b in range(num_blocks)]
