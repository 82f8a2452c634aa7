"""KV leaves the blocks in logical order and comes back to the very positions asked for, by numpy and by the kernel."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.model.kv_copies import KVCopies
from segue.model.native import NativeUnavailable, load

LAYERS, HEADS, NUM_BLOCKS = 2, 3, 9


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    try:
        return load(tmp_path_factory.mktemp("native"))
    except NativeUnavailable as error:
        pytest.skip(error.reason)


def some_kv(block_size, head_dim, dtype):
    numbers = torch.arange(LAYERS * 2 * NUM_BLOCKS * HEADS * block_size * head_dim, dtype=torch.int64)
    return (numbers % 30011).to(dtype).reshape(LAYERS, 2, NUM_BLOCKS, HEADS, block_size, head_dim)


def tokens_of(kv, blocks):
    """[layers, 2, heads, tokens, dim]: what a sequence with these blocks has, position by position."""
    return torch.cat([kv[:, :, block] for block in blocks], dim=3)


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("native", [False, True])
def test_positions_come_back_to_their_places_and_nothing_else_changes(kernels, native, data):
    size, dim = data.draw(st.sampled_from([1, 3, 16])), data.draw(st.sampled_from([8, 64]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    order = st.permutations(range(NUM_BLOCKS))
    source_blocks, target_blocks = data.draw(order)[:4], data.draw(order)[:4]
    start, first, last, stop = sorted(data.draw(st.lists(st.integers(0, 4 * size), min_size=4, max_size=4)))
    source, target = some_kv(size, dim, dtype), -some_kv(size, dim, dtype)
    expected = target.clone()
    for position in range(first, last):
        block, inside = divmod(position, size)
        expected[:, :, target_blocks[block], :, inside] = source[:, :, source_blocks[block], :, inside]

    outgoing = KVCopies(source)
    chunk = memoryview(bytearray((stop - start) * outgoing.layout.token_bytes))
    outgoing.read(source_blocks, start, stop, chunk)
    if chunk:
        read = torch.frombuffer(chunk, dtype=dtype).reshape(LAYERS, 2, HEADS, stop - start, dim)
        assert torch.equal(read, tokens_of(source, source_blocks)[..., start:stop, :])
    KVCopies(target, kernels if native else None).write(target_blocks, start, stop, chunk, first, last)
    assert torch.equal(target, expected)


@pytest.mark.parametrize(
    ("blocks", "start", "stop", "size"),
    [([1], 0, 4, 4 * 64 - 1), ([1], 0, 5, 5 * 64), ([NUM_BLOCKS], 0, 4, 4 * 64), ([-1], 0, 4, 4 * 64)],
    ids=["a byte short", "too few blocks", "a block beyond", "a block below"],
)
def test_the_kernel_refuses_what_would_write_elsewhere(kernels, blocks, start, stop, size):
    kv = some_kv(4, 8, torch.float32)
    before = kv.clone()
    per_token = LAYERS * 2 * HEADS * 8 * 4 // 64
    with pytest.raises(ValueError):
        kernels.place(kv, memoryview(bytearray(size * per_token)), blocks, start, stop, start, stop)
    assert torch.equal(kv, before)


@settings(max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize("native", [False, True])
def test_whole_blocks_go_to_their_slots_and_back(kernels, native, data):
    size, dim = data.draw(st.sampled_from([4, 16])), data.draw(st.sampled_from([8, 64]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    count = data.draw(st.integers(0, 4))
    order = st.permutations(range(NUM_BLOCKS))
    source_blocks, target_blocks, slots = (data.draw(order)[:count] for _ in range(3))
    source, target = some_kv(size, dim, dtype), -some_kv(size, dim, dtype)
    expected = target.clone()
    for one, other in zip(source_blocks, target_blocks, strict=True):
        expected[:, :, other] = source[:, :, one]
    copies = KVCopies(source, kernels if native else None)
    memory = copies.host_memory(NUM_BLOCKS * size * copies.layout.token_bytes)
    copies.blocks_out(source_blocks, slots, memory)
    alone = memoryview(bytearray(size * copies.layout.token_bytes))
    for block, slot in zip(source_blocks, slots, strict=True):
        copies.read([block], 0, size, alone)
        assert memory[slot * len(alone) : (slot + 1) * len(alone)] == alone, "a slot has the logical order"
    KVCopies(target, kernels if native else None).blocks_in(target_blocks, slots, memory)
    assert torch.equal(target, expected)


@pytest.mark.parametrize(
    ("blocks", "slots"), [([NUM_BLOCKS], [0]), ([-1], [0]), ([1], [2]), ([1], [-1]), ([1, 2], [0])]
)
def test_the_kernel_refuses_blocks_and_slots_that_are_not_there(kernels, blocks, slots):
    kv = some_kv(4, 8, torch.float32)
    copies = KVCopies(kv, kernels)
    memory = copies.host_memory(2 * 4 * copies.layout.token_bytes)
    before = kv.clone()
    for move in (copies.blocks_out, copies.blocks_in):
        with pytest.raises(ValueError):
            move(blocks, slots, memory)
    assert torch.equal(kv, before) and not any(memory)
