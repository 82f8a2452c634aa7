"""Moving, saving and loading beside an event loop: whoever is cancelled, closed or leaves, and whenever, nothing stays behind.

A test that says "whenever" is run again and again, each time one turn of the event loop later, with the engines' threads
brought up to date in every turn, until what it interrupts has ended by itself.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from inspect import iscoroutinefunction

import pytest

from segue.base.config import EngineConfig
from segue.base.errors import EngineClosed, ParentFailed, SegueError, StateError
from segue.base.types import SamplingParams
from segue.engine import AsyncEngine, EngineCore, Request
from tests.fakes import FakeExecutor, cut_chunks, expected

PROMPT = list(range(30))
ANSWER = expected(PROMPT, 60)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Sixteen tokens in a chunk, so that a move has several moments to be interrupted in."""
    cut_chunks(monkeypatch, 16 * FakeExecutor(2, 1).kv_layout.token_bytes)


class Slow(FakeExecutor):
    """Takes its time until told to hurry, so that a request is still running when a test does something to it."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.hurry = threading.Event()

    def execute(self, plan):
        self.hurry.wait(0.01)
        return super().execute(plan)


def make(num_blocks=64, **options):
    config = EngineConfig(num_blocks, 4, 64, 8, **{"max_model_len": 200, **options})
    return AsyncEngine(EngineCore(Slow(num_blocks, 4), config))


def hurry(*engines):
    for engine in engines:
        engine._engine._executor.hurry.set()


def greedy(max_tokens=60, **more):
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)


def run(main):
    """In an event loop of its own, until every task and every thread that it started has ended; never for ever."""

    async def bounded():
        async with asyncio.timeout(60):
            result = await main
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
            return result

    return asyncio.run(bounded())


def catch_up(*engines):
    """Wait, event loop and all, until the engines have carried out everything asked of them."""

    def ask(engine):
        with suppress(EngineClosed):
            asyncio.run(engine.call(lambda core: None))

    for engine in engines:
        thread = threading.Thread(target=ask, args=(engine,))
        thread.start()
        thread.join()


async def turns(count, *engines):
    for _ in range(count):
        await asyncio.sleep(0)
        catch_up(*engines)


async def interrupted(work, count, *engines, late=True):
    """Cancel `work` after so many turns; whether it had ended before. With `late`, what it asked for last has been done,
    and it has not heard of it; without, the engines may not have come to it yet."""
    task = asyncio.create_task(work)
    await turns(count, *engines)
    if not late:
        await asyncio.sleep(0)
    ended = task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return ended


def left(core):
    """What an engine that has nothing to do should not have."""
    core.check()
    return core.has_work, core.stats().kv_usage, len(core.kv.leases), list(core._answers)


NOTHING = (False, 0.0, 0, [])


async def settled(*engines):
    """Wait until nothing is left in any of them."""
    for engine in engines:
        while await engine.call(left) != NOTHING:
            await asyncio.sleep(0.001)


async def close(*engines):
    for engine in engines:
        await engine.close()


async def read(stream):
    return [token async for delta in stream for token in delta.token_ids]


def whenever(scenario):
    """Call `scenario(count)` for every moment there is to interrupt; it says whether it came too late."""
    count = 0
    while not (run(scenario(count)) if iscoroutinefunction(scenario) else scenario(count)):
        count += 1
        assert count < 200, "it never ends"
    assert count > 1, "there was nothing to interrupt"


async def ran_to_its_end(engine, request_id="r"):
    """With or without somebody to read it."""
    return request_id in await engine.call(lambda core: [state.id for state in core.states()])


# Cancelled


@pytest.mark.parametrize("late", [False, True])
def test_a_move_can_be_cancelled_whenever(late):
    async def scenario(count):
        home, away = make(), make()
        stream = home.generate(PROMPT, greedy(), request_id="r")
        first = await anext(stream)
        ended = await interrupted(home.hand_over("r", away), count, home, away, late=late)
        hurry(home, away)
        assert [*first.token_ids, *await read(stream)] == ANSWER
        await settled(home, away)
        assert await ran_to_its_end(home) != await ran_to_its_end(away), "here or there"
        await close(home, away)
        return ended

    whenever(scenario)


def test_a_move_beside_other_requests_can_be_cancelled_whenever():
    async def scenario(count):
        home, away = make(), make()
        busy = [asyncio.create_task(read(engine.generate([9], greedy(150)))) for engine in (home, away)]
        stream = home.generate(PROMPT, greedy(), request_id="r")
        first = await anext(stream)
        ended = await interrupted(home.hand_over("r", away), count, home, away, late=False)
        hurry(home, away)
        assert [*first.token_ids, *await read(stream)] == ANSWER
        assert await asyncio.gather(*busy) == [expected([9], 150)] * 2
        await settled(home, away)
        assert await ran_to_its_end(home) != await ran_to_its_end(away)
        await close(home, away)
        return ended

    whenever(scenario)


@pytest.mark.parametrize("late", [False, True])
def test_a_save_can_be_cancelled_whenever(tmp_path, late):
    engine = make()
    hurry(engine)
    state = run(held(engine))

    async def scenario(count):
        return await interrupted(engine.save(state, tmp_path / "s.segue"), count, engine, late=late)

    async def end():
        assert await engine.call(lambda core: len(core.kv.leases)) == 1, "the state's own"
        await engine.call(lambda core: core.release(state))
        await settled(engine)
        await engine.close()

    whenever(scenario)
    run(end())


@pytest.mark.parametrize("late", [False, True])
def test_a_save_of_a_running_request_can_be_cancelled_whenever(tmp_path, late):
    async def scenario(count):
        engine = make()
        stream = engine.generate(PROMPT, greedy(), request_id="r")
        first = await anext(stream)
        ended = await interrupted(engine.save("r", tmp_path / "s.segue"), count, engine, late=late)
        hurry(engine)
        assert [*first.token_ids, *await read(stream)] == ANSWER
        await settled(engine)
        await engine.close()
        return ended

    whenever(scenario)


async def held(engine):
    return [delta async for delta in engine.generate(PROMPT, greedy(8), hold=True)][-1].state


def save_one(path):
    engine = EngineCore(FakeExecutor(64, 4), EngineConfig(64, 4, 64, 8, max_model_len=200))
    engine.save(engine.generate(PROMPT, greedy(8), hold=True)[0].state, path)


async def without_a_load(engine):
    """It left nothing that is held, or open."""
    await settled(engine)
    assert [state.num_held for state in await engine.call(lambda core: core.states())] in ([], [0])
    await engine.close()


@pytest.mark.parametrize("late", [False, True])
def test_a_load_can_be_cancelled_whenever(tmp_path, late):
    save_one(tmp_path / "s.segue")

    def scenario(count):
        engine = make()
        ended = run(interrupted(engine.load(tmp_path / "s.segue"), count, engine, late=late))
        run(engine.close() if ended else without_a_load(engine))
        return ended

    whenever(scenario)


@pytest.mark.parametrize("done", [False, True], ids=["a chunk is written", "all is done but the telling"])
def test_a_load_leaves_nothing_if_it_is_cancelled_when(tmp_path, done):
    save_one(tmp_path / "s.segue")
    engine = make()
    entered, proceed = threading.Event(), threading.Event()
    real = engine._engine._executor.write_kv

    def write_kv(*args):
        entered.set()
        proceed.wait()
        real(*args)

    engine._engine._executor.write_kv = write_kv

    async def main():
        with ThreadPoolExecutor(1) as one_thread:
            asyncio.get_running_loop().set_default_executor(one_thread)
            task = asyncio.create_task(engine.load(tmp_path / "s.segue"))
            while not entered.is_set():
                await asyncio.sleep(0.001)
            if done:
                proceed.set()
                one_thread.submit(int).result()  # the event loop stands still until the load has ended
            task.cancel()
            await asyncio.sleep(0)
            proceed.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main())
    run(without_a_load(engine))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["prompt", "continuation", "heir"])
def test_a_stream_can_be_cancelled_whenever_it_starts(kind, late):
    async def scenario(count):
        engine = make()
        request = Request(parent="before", suffix=[7], params=greedy(150), request_id="r", consume=True)
        if kind == "prompt":
            request = Request(prompt=[1, 2], params=greedy(150), request_id="r")
        before = engine.generate(PROMPT, greedy(3), request_id="before", hold=kind == "continuation")
        if kind == "heir":
            await anext(before)
        else:
            await read(before)
        await interrupted(read(engine.generate(request)), count, engine, late=late)
        await read(before)
        await engine.call(lambda core: core.release("before"))
        await settled(engine)
        assert not await ran_to_its_end(engine)
        await engine.close()

    for count in range(12):
        run(scenario(count))


# Readers that leave


@pytest.mark.parametrize("late", [False, True])
def test_a_reader_may_leave_whenever_during_a_move_and_the_request_ends(late):
    async def scenario(count):
        home, away = make(), make()
        stream = home.generate(PROMPT, greedy(150), request_id="r")
        await anext(stream)
        move = asyncio.create_task(home.hand_over("r", away))
        await turns(count, home, away)
        if not late:
            await asyncio.sleep(0)
        ended = move.done()
        await stream.aclose()
        with suppress(StateError):
            await move
        await settled(home, away)
        assert not await ran_to_its_end(home) and not await ran_to_its_end(away)
        await close(home, away)
        return ended

    whenever(scenario)


def test_a_reader_that_is_cancelled_whenever_during_a_move_ends_the_request():
    async def scenario(count):
        home, away = make(), make()
        started = asyncio.Event()

        async def read():
            async for _ in home.generate(PROMPT, greedy(150), request_id="r"):
                started.set()

        reader = asyncio.create_task(read())
        await started.wait()
        move = asyncio.create_task(home.hand_over("r", away))
        await turns(count, home, away)
        ended = move.done()
        reader.cancel()
        with suppress(StateError):
            await move
        await asyncio.gather(reader, return_exceptions=True)
        await settled(home, away)
        assert not await ran_to_its_end(home) and not await ran_to_its_end(away)
        await close(home, away)
        return ended

    whenever(scenario)


@pytest.mark.parametrize("num_moves", [1, 2, 3])
def test_a_reader_that_leaves_before_it_has_read_anything_from_where_its_request_went_ends_it_there(num_moves):
    async def main():
        engines = make(), make()
        stream = engines[0].generate(PROMPT, greedy(150), request_id="r")
        await anext(stream)
        for number in range(num_moves):
            await engines[number % 2].hand_over("r", engines[1 - number % 2])
        await stream.aclose()
        await settled(*engines)
        assert not any([await ran_to_its_end(engine) for engine in engines])
        await close(*engines)

    run(main())


def test_a_stream_that_nobody_read_during_several_moves_has_everything():
    async def main():
        engines = make(), make(), make()
        stream = engines[0].generate(PROMPT, greedy(), request_id="r")
        first = await anext(stream)
        for number in range(5):
            await engines[number % 3].hand_over("r", engines[(number + 1) % 3])
            catch_up(*engines)
        hurry(*engines)
        assert [*first.token_ids, *await read(stream)] == ANSWER
        await settled(*engines)
        await close(*engines)

    run(main())


# Engines that close


@pytest.mark.parametrize("which", [0, 1], ids=["source", "destination"])
def test_an_engine_may_close_whenever_during_a_move(which):
    async def scenario(count):
        engines = make(), make()
        closed, other = engines[which], engines[1 - which]
        stream = engines[0].generate(PROMPT, greedy(), request_id="r")
        first = await anext(stream)
        move = asyncio.create_task(engines[0].hand_over("r", engines[1]))
        await turns(count, *engines)
        ended = move.done()
        await closed.close()
        with suppress(SegueError):
            await move
        hurry(other)
        try:
            assert [*first.token_ids, *await read(stream)] == ANSWER, "it went on in the other one"
        except EngineClosed:
            await settled(other)
            assert not await ran_to_its_end(other)
        await settled(other)
        await other.close()
        return ended

    whenever(scenario)


def test_closing_ends_saves_and_loads_under_way(tmp_path):
    save_one(tmp_path / "s.segue")

    async def scenario(count):
        engine = make()
        hurry(engine)
        state = await held(engine)
        work = [engine.save(state, tmp_path / "t.segue"), engine.load(tmp_path / "s.segue")]
        tasks = [asyncio.create_task(one) for one in work]
        await turns(count, engine)
        ended = all(task.done() for task in tasks)
        await engine.close()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, EngineClosed) or not isinstance(outcome, Exception) for outcome in outcomes)
        return ended

    whenever(scenario)


# KV that gives way


def test_a_move_succeeds_though_its_kv_gives_way_meanwhile():
    async def main():
        home, away = make(num_blocks=20), make()
        stream = home.generate(PROMPT, greedy(20), request_id="r")
        first = await anext(stream)
        proceed = threading.Event()
        blocked = asyncio.create_task(away.call(lambda core: proceed.wait()))
        move = asyncio.create_task(home.hand_over("r", away))
        while await home.call(lambda core: core.has_work):
            await asyncio.sleep(0)  # until it stands still
        hurry(home, away)
        busy = await read(home.generate([41] * 60, greedy(3)))  # 16 of 19 blocks
        proceed.set()
        assert await move == "r" and await blocked
        rest = [delta async for delta in stream]
        assert busy == expected([41] * 60, 3)
        assert [*first.token_ids, *(token for delta in rest for token in delta.token_ids)] == ANSWER[:20]
        assert rest[-1].reuse.recomputed > 0
        await settled(home, away)
        await close(home, away)

    run(main())


# Long holds, long lines


@pytest.mark.parametrize("seconds", [1e9, 10**9, True])
def test_an_engine_with_a_very_long_hold_goes_on(seconds):
    async def main():
        engine = make()
        hurry(engine)
        state = [delta async for delta in engine.generate(PROMPT, greedy(2), hold=seconds)][-1].state
        catch_up(engine)
        assert await read(engine.generate([4], greedy(2))) == expected([4], 2)
        assert state.num_held == 31
        await engine.close()
        assert engine._failure is None

    run(main())


@pytest.mark.parametrize("end", ["abort", "fail"])
def test_a_long_line_of_heirs_ends_with_its_first_and_nobody_else_does(end):
    line = [Request(parent=f"r{n}", params=greedy(1), request_id=f"r{n + 1}") for n in range(3000)]

    async def main():
        engine = make()
        first = engine.generate(PROMPT, greedy(150), request_id="r0")
        await anext(first)
        await engine.call(lambda core: [core.submit(request) for request in line])
        heirs = [asyncio.create_task(read(engine.generate(Request(parent=f"r{n}")))) for n in (1500, 3000)]
        other = engine.generate([9], greedy(20))
        seen = await anext(other) if end == "abort" else None
        await turns(3, engine)
        if end == "abort":
            await first.aclose()
        else:
            await engine.call(lambda core: setattr(core._executor, "fail_next", RuntimeError("injected")))
        outcomes = await asyncio.gather(*heirs, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ParentFailed] * 2
        hurry(engine)
        rest = await read(other)
        assert (list(seen.token_ids) if seen else []) + rest == expected([9], 20)
        await settled(engine)
        await engine.close()
        assert engine._failure is None

    run(main())


def test_what_one_caller_breaks_is_that_callers_alone():
    async def main():
        engine = make()
        hurry(engine)
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda core: 1 // 0)
        engine.post(lambda: 1 // 0)
        assert await read(engine.generate([1], greedy(3))) == expected([1], 3)
        await engine.close()

    run(main())
