"""Tiers by themselves: what leaves a full one, slots of host memory, and files that outlive whoever wrote them."""

import contextlib
import ctypes
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.base.errors import TierError
from segue.kv.tiers import Courier, DiskTier, HostTier, ahead
from segue.kv.tiers.replacement import Replacement

BLOCK = 4096


def name_of(number, tenant=0):
    return bytes([tenant]) * 8 + blake2b(bytes(str(number), "ascii"), digest_size=24).digest()


def content_of(number, size=BLOCK):
    return random.Random(number).randbytes(size)


def view(number, size=BLOCK):
    return memoryview(bytearray(content_of(number, size)))


# ---- replacement


@given(st.lists(st.tuples(st.sampled_from("auer"), st.integers(0, 12)), max_size=200), st.integers(1, 6))
def test_it_never_loses_count_and_never_evicts_what_is_not_free(operations, capacity):
    order, held = Replacement(capacity), {}
    for what, number in operations:
        name = bytes([number])
        if what == "a" and name not in order:
            pinned = {other for other in held if other[0] % 3 == 0}
            while order.size >= capacity and (gone := order.evict(lambda other, pinned=pinned: other not in pinned)):
                assert gone not in pinned
                del held[gone]
            order.add(name, 1)
            held[name] = True
        elif what == "u" and name in order:
            order.use(name)
        elif what == "e" and (gone := order.evict()) is not None:
            del held[gone]
        elif what == "r" and name in order:
            order.remove(name)
            del held[name]
        assert set(order) == set(held) and len(order) == order.size == len(held)
    while order.evict() is not None:
        pass
    assert len(order) == order.size == 0


def test_a_pass_over_much_else_leaves_what_is_used():
    order = Replacement(100)

    def put(name):
        if name in order:
            order.use(name)
            return True
        while order.size >= 100:
            order.evict()
        order.add(name, 1)
        return False

    hot = [name_of(number) for number in range(40)]
    for _ in range(3):
        for name in hot:
            put(name)
    for number in range(1000, 3000):
        put(name_of(number))
    assert sum(name in order for name in hot) == 40


# ---- host


def test_a_slot_is_found_only_when_it_is_full_and_reused_only_when_nobody_reads_it():
    host = HostTier(memoryview(bytearray(2 * BLOCK)), BLOCK)
    slot = host.begin(name_of(1))
    assert host.is_known(name_of(1)) and name_of(1) not in host
    host.view(slot)[:] = content_of(1)
    host.filled(name_of(1))
    assert host.view(host.use(name_of(1))) == content_of(1)
    host.pin(name_of(1))
    for number in (2, 3):
        host.view(host.begin(name_of(number)))[:] = content_of(number)
        host.filled(name_of(number))
    assert name_of(1) in host and name_of(3) in host and name_of(2) not in host
    other = host.begin(name_of(4))
    assert other is not None and host.begin(name_of(5)) is None, "one is read, the other is being filled"
    host.failed(name_of(4))
    assert not host.is_known(name_of(4)) and host.begin(name_of(5)) is not None


def test_what_is_dropped_while_it_is_read_goes_with_its_reader():
    host = HostTier(memoryview(bytearray(2 * BLOCK)), BLOCK)
    host.view(host.begin(name_of(1)))[:] = content_of(1)
    host.filled(name_of(1))
    held = host.pin(name_of(1))
    assert host.drop(bytes(8)) == 1 and name_of(1) not in host and host.begin(name_of(1)) is None
    assert held == content_of(1)
    host.unpin(name_of(1))
    assert len(host) == 0 and host.begin(name_of(1)) is not None


def resident_bytes(memory):
    pages = (ctypes.c_ubyte * (len(memory) // mmap.PAGESIZE))()
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(at), ctypes.c_size_t(len(memory)), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="pages are asked for on Linux alone")
def test_the_pages_of_the_slots_to_come_are_had_beforehand_and_no_more(monkeypatch):
    monkeypatch.setattr(ahead, "_AHEAD_BYTES", 1 << 20)
    memory = mmap.mmap(-1, 64 << 20, access=mmap.ACCESS_COPY)
    host = HostTier(memoryview(memory), 1 << 16)
    host._ahead.wait()
    if resident_bytes(memory) == 0:
        pytest.skip("this system does not know MADV_POPULATE_WRITE")
    assert resident_bytes(memory) == 1 << 20
    for number in range(64):
        host.view(host.begin(name_of(number)))[:] = bytes([number]) * (1 << 16)
        host.filled(name_of(number))
        host._ahead.wait()
        assert 1 << 19 <= resident_bytes(memory) - (number + 1) * (1 << 16) <= 1 << 20
    assert all(host.view(host.use(name_of(number))) == bytes([number]) * (1 << 16) for number in range(64))


# ---- disk


def filled(folder, numbers, size=1 << 30):
    tier = DiskTier(folder, size)
    for number in numbers:
        tier.store(name_of(number), view(number))
    return tier


def loaded(tier, number):
    out = memoryview(bytearray(BLOCK))
    return out if tier.load(name_of(number), out) else None


def test_another_process_finds_what_was_stored(tmp_path):
    filled(tmp_path, range(9))
    tier = DiskTier(tmp_path, 1 << 30)
    assert tier.find([name_of(number) for number in range(10)]) == [True] * 9 + [False]
    assert all(loaded(tier, number) == content_of(number) for number in range(9))
    assert tier.verify() == (9, 0)
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("**/*")), "KV tells what was said"


def test_it_keeps_to_its_size(tmp_path):
    tier = filled(tmp_path, range(50), 10 * (BLOCK + 64))
    assert len(tier) == 10 and sum(path.stat().st_size for path in tmp_path.glob("*/*/*")) == tier.size_bytes


def test_two_that_write_one_folder(tmp_path):
    tiers = [DiskTier(tmp_path, 30 * (BLOCK + 64)) for _ in range(2)]
    failures = []

    def work(tier, seed):
        chosen = random.Random(seed)
        for _ in range(400):
            number = chosen.randrange(60)
            try:
                if chosen.random() < 0.5:
                    tier.store(name_of(number), view(number))
                elif (found := loaded(tier, number)) is not None and found != content_of(number):
                    failures.append(number)
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(tier, seed)) for seed, tier in enumerate(tiers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert DiskTier(tmp_path, 1 << 30).verify()[1] == 0 and not list(tmp_path.glob("*/*/*.part"))


def test_killed_in_the_middle_of_a_store_two_hundred_times(tmp_path):
    chosen, data = random.Random(1), view(0, 64 * BLOCK)
    for round_ in range(200):
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                tier = DiskTier(tmp_path, 1 << 30)
                for number in range(1000):
                    tier.store(name_of(1000 * round_ + number), data)
            os._exit(0)
        time.sleep(chosen.uniform(0.0, 0.015))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    tier = DiskTier(tmp_path, 1 << 30)
    assert len(tier) > 20, "some had stored something"
    for name in tier._order:
        out = memoryview(bytearray(64 * BLOCK))
        assert tier.load(name, out) and out == data
    assert tier.verify() == (len(tier), 0)
    assert list(tmp_path.glob("*/*/*.part")), "some were killed in the middle of a write"


def test_a_disk_that_is_full(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "segue", str(folder)], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        tier = DiskTier(folder, 1 << 30)
        courier = Courier(tier)
        for number in range(80):
            courier.store(name_of(number), view(number))
        while courier.has_work:
            courier.finished()
            courier.wait(0.01)
        assert 20 <= courier.counts.stored < 64 and courier.counts.errors >= 3 and courier.breaker.is_open
        assert courier.find([name_of(0)]) == [False], "it is left alone for a while"
        courier.close(1.0)
        again = DiskTier(folder, 1 << 30)
        assert again.verify() == (courier.counts.stored, 0) and not list(folder.glob("*/*/*.part"))
        assert loaded(again, 0) == content_of(0)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_tier_that_was_left_alone_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr("segue.kv.tiers.courier._SHORTEST_BREAK", 0.05)
    courier = Courier(DiskTier(tmp_path, 1 << 30))
    courier.breaker.pause = 0.05
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError("injected")))
        for number in range(3):
            courier.store(name_of(number), view(number))
        while courier.has_work:
            courier.finished()
            courier.wait(0.01)
        assert courier.counts.breaks == 1 and not courier.store(name_of(9), view(9))
    deadline = time.monotonic() + 20
    while not courier.store(name_of(5), view(5)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    while courier.has_work:
        courier.finished()
        courier.wait(0.01)
    assert courier.counts.stored == 1 and loaded(courier.tier, 5) == content_of(5)
    courier.close(1.0)


def test_what_is_asked_of_a_tier_that_fails_is_an_error(tmp_path):
    courier = Courier(DiskTier(tmp_path, 1 << 30))
    with pytest.raises(TierError, match="injected"):
        courier.ask(lambda: (_ for _ in ()).throw(OSError("injected")))
    courier.close(1.0)
    with pytest.raises(TierError, match="closed"):
        courier.ask(lambda: 1)
