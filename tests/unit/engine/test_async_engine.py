import asyncio
import threading

import pytest

from segue.base.config import EngineConfig
from segue.base.errors import EngineClosed, InvalidRequest, ParentFailed, RequestTooLong, SnapshotError, StepFailed
from segue.base.types import SamplingParams
from segue.engine import AsyncEngine, EngineCore, Request
from tests.fakes import FakeExecutor, expected


def make() -> AsyncEngine:
    return AsyncEngine(EngineCore(FakeExecutor(64, 4), EngineConfig(64, 4, 64, 8, max_model_len=200)))


def greedy(max_tokens=8, **more):
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)


async def collect(engine, prompt, params, **options):
    return [token async for delta in engine.generate(prompt, params, **options) for token in delta.token_ids]


def test_many_streams_at_once():
    async def main():
        engine = make()
        prompts = [[i, i + 1, i + 2] for i in range(30)]
        answers = await asyncio.gather(*(collect(engine, p, greedy(5 + p[0] % 7)) for p in prompts))
        await engine.close()
        return [(p, a) for p, a in zip(prompts, answers, strict=True)]

    for prompt, answer in asyncio.run(main()):
        assert answer == expected(prompt, 5 + prompt[0] % 7)


def test_leaving_a_stream_frees_its_request():
    async def main():
        engine = make()
        stream = engine.generate([1, 2, 3], greedy(150))
        await anext(stream)
        await stream.aclose()
        usage = await engine.call(lambda core: (core.has_work, core.kv.usage))
        task = asyncio.create_task(collect(engine, [4, 5], greedy(150)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.05)
        after = await engine.call(lambda core: (core.has_work, core.kv.usage))
        await engine.close()
        return usage, after

    assert asyncio.run(main()) == ((False, 0.0), (False, 0.0))


def test_cancelling_while_a_request_is_submitted_leaves_nothing_running():
    async def main():
        engine = make()
        entered, proceed = threading.Event(), threading.Event()

        def slow_submit(core):
            real = core.submit

            def submit(*args, **options):
                request_id = real(*args, **options)
                entered.set()
                proceed.wait()
                return request_id

            core.submit = submit

        await engine.call(slow_submit)
        task = asyncio.create_task(collect(engine, [1], SamplingParams(max_tokens=None, temperature=0)))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.sleep(0)
        proceed.set()
        await asyncio.gather(task, return_exceptions=True)
        left = await engine.call(lambda core: core.has_work)
        await engine.close()
        return left

    assert asyncio.run(main()) is False


def test_an_id_in_use_is_refused_without_harm_to_its_owner():
    async def main():
        engine, steps = make(), threading.Semaphore(1)
        execute = engine._engine._executor.execute
        engine._engine._executor.execute = lambda plan: steps.acquire() and execute(plan)
        stream = engine.generate([1, 2], greedy(20), request_id="mine")
        first = await anext(stream)
        second = asyncio.create_task(collect(engine, [3], greedy(), request_id="mine"))
        await asyncio.sleep(0)
        steps.release()
        with pytest.raises(InvalidRequest, match="request_id"):
            await second
        steps.release(100)
        rest = [token async for delta in stream for token in delta.token_ids]
        await engine.close()
        return [*first.token_ids, *rest]

    assert asyncio.run(main()) == expected([1, 2], 20)


def test_an_event_loop_that_ends_takes_only_its_own_requests_along():
    engine = make()

    async def leave():
        stream = engine.generate([1], SamplingParams(max_tokens=None, temperature=0, min_tokens=190))
        await anext(stream)
        return stream

    loop = asyncio.new_event_loop()
    abandoned = loop.run_until_complete(leave())
    loop.close()

    async def main():
        answer = await collect(engine, [1, 2], greedy(30))
        await engine.close()
        return answer

    assert asyncio.run(main()) == expected([1, 2], 30)
    del abandoned


def test_closing_under_load_ends_everything_once():
    async def main():
        engine = make()
        tasks = [asyncio.create_task(collect(engine, [i], SamplingParams(max_tokens=None))) for i in range(40)]
        await asyncio.sleep(0.01)
        await engine.close()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        return engine._failure, engine._engine._executor.closed, outcomes

    failure, closed, outcomes = asyncio.run(main())
    assert failure is None and closed
    assert all(isinstance(outcome, (EngineClosed, list)) for outcome in outcomes)


def test_n_answers_come_in_one_stream():
    async def main():
        engine = make()
        reasons = [d.index async for d in engine.generate([1, 2], SamplingParams(n=3, max_tokens=4)) if d.finish_reason]
        await engine.close()
        return sorted(reasons)

    assert asyncio.run(main()) == [0, 1, 2]


def test_refusals_and_failures_reach_their_caller_only():
    async def main():
        engine = make()
        with pytest.raises(InvalidRequest, match="prompt"):
            await collect(engine, [], greedy())
        await engine.call(lambda core: setattr(core._executor, "fail_next", RuntimeError("boom")))
        with pytest.raises(StepFailed, match="boom"):
            await collect(engine, [1, 2], greedy())
        answer = await collect(engine, [1, 2], greedy(3))
        await engine.close()
        return answer

    assert asyncio.run(main()) == expected([1, 2], 3)


def test_closing_ends_every_stream():
    async def main():
        engine = make()
        task = asyncio.create_task(collect(engine, [1], SamplingParams(max_tokens=None, temperature=0)))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineClosed):
            await collect(engine, [1], greedy())
        return await asyncio.gather(task, return_exceptions=True)

    (outcome,) = asyncio.run(main())
    assert isinstance(outcome, (EngineClosed, list))


def test_a_broken_engine_tells_every_stream():
    async def main():
        engine = make()

        def explode(core):
            core._scheduler.apply = None

        await engine.call(explode)
        with pytest.raises(EngineClosed, match="stopped"):
            await collect(engine, [1, 2], greedy())
        with pytest.raises(EngineClosed):
            await collect(engine, [1, 2], greedy())

    asyncio.run(main())


PROMPT = list(range(30))


class Slow(FakeExecutor):
    """Takes its time until told to hurry, so that a request is still running when a test does something to it."""

    def __init__(self, num_blocks, block_size):
        super().__init__(num_blocks, block_size)
        self.hurry = threading.Event()

    def execute(self, plan):
        self.hurry.wait(0.03)
        return super().execute(plan)


def slow():
    executor = Slow(64, 4)
    return AsyncEngine(EngineCore(executor, EngineConfig(64, 4, 64, 8, max_model_len=200))), executor.hurry


def test_continuations_forks_and_holds():
    async def main():
        engine, hurry = slow()
        last = [delta async for delta in engine.generate(PROMPT, greedy(8), hold=True)][-1]
        child = [delta async for delta in engine.generate_continuation(last.state, [7], greedy(5))]
        running = engine.generate(PROMPT, greedy(12), request_id="parent")
        await anext(running)
        heir = asyncio.create_task(collect(engine, Request(parent="parent", suffix=[8]), greedy(4)))
        hurry.set()
        rest = [token async for delta in running for token in delta.token_ids]
        heirs = await heir
        await engine.close()
        return last, child, rest, heirs

    _, child, rest, heirs = asyncio.run(main())
    answer = expected(PROMPT, 12)
    assert [token for delta in child for token in delta.token_ids] == expected([*PROMPT, *answer[:8], 7], 5)
    assert (child[-1].reuse.held, child[-1].reuse.new) == (37, 2)
    assert rest == answer[1:] and heirs == expected([*PROMPT, *answer, 8], 4)


def test_an_heir_hears_that_its_parent_was_aborted():
    async def main():
        engine, _ = slow()
        parent = engine.generate(PROMPT, greedy(150), request_id="parent")
        await anext(parent)
        heir = asyncio.create_task(collect(engine, Request(parent="parent"), greedy(4)))
        while not await engine.call(lambda core: core._answers.get("parent").turn.heirs):
            await asyncio.sleep(0)
        await parent.aclose()
        with pytest.raises(ParentFailed, match="aborted"):
            await asyncio.wait_for(heir, 10)
        await engine.close()

    asyncio.run(main())


def test_saving_and_loading_beside_running_requests(tmp_path):
    async def main():
        (source, hurry), destination = slow(), make()
        stream = source.generate(PROMPT, greedy(60), request_id="r")
        seen = [await anext(stream) for _ in range(5)]
        await source.save("r", tmp_path / "r.segue")
        hurry.set()
        seen += [delta async for delta in stream]
        state = await destination.load(tmp_path / "r.segue")
        rest = [token async for delta in destination.resume(state, consume=True) for token in delta.token_ids]
        with pytest.raises(SnapshotError):
            await destination.load(__file__)
        usage = await destination.call(lambda core: (core.check(), core.stats().kv_usage))
        await source.close()
        await destination.close()
        return [token for delta in seen for token in delta.token_ids], rest, usage

    tokens, rest, usage = asyncio.run(main())
    assert tokens == expected(PROMPT, 60)
    assert rest and rest == tokens[-len(rest) :]
    assert usage == (None, 0.0)


def test_a_stream_goes_on_while_its_request_moves_there_and_back():
    async def main():
        (home, home_hurry), (away, away_hurry) = slow(), slow()
        stream = home.generate(PROMPT, greedy(60), request_id="r")
        seen = [await anext(stream) for _ in range(5)]
        await home.hand_over("r", away)
        seen += [await anext(stream) for _ in range(5)]
        await away.hand_over("r", home)
        home_hurry.set()
        seen += [delta async for delta in stream]
        usage = [await engine.call(lambda core: (core.check(), core.stats().kv_usage)) for engine in (home, away)]
        home_hurry.clear()
        again = home.generate(PROMPT, greedy(150), request_id="s")
        await anext(again)
        await home.hand_over("s", away)
        await anext(again)
        await again.aclose()  # ends it where it is now
        while await away.call(lambda core: core.has_work):
            await asyncio.sleep(0)
        away_hurry.set()
        await home.close()
        await away.close()
        return seen, usage

    seen, usage = asyncio.run(main())
    assert [token for delta in seen for token in delta.token_ids] == expected(PROMPT, 60)
    assert usage == [(None, 0.0), (None, 0.0)]


def test_a_refused_move_changes_nothing():
    async def main():
        home, hurry = slow()
        small = AsyncEngine(EngineCore(FakeExecutor(4, 4), EngineConfig(4, 4, 64, 8, max_model_len=200)))
        stream = home.generate(PROMPT, greedy(20), request_id="r")
        seen = [await anext(stream)]
        with pytest.raises(RequestTooLong):
            await home.hand_over("r", small)
        hurry.set()
        seen += [delta async for delta in stream]
        await home.close()
        await small.close()
        return [token for delta in seen for token in delta.token_ids]

    assert asyncio.run(main()) == expected(PROMPT, 20)


def test_leases_end_by_themselves_in_an_idle_engine():
    async def main():
        engine = make()
        last = [delta async for delta in engine.generate(PROMPT, greedy(2), hold=0.05)][-1]
        for _ in range(200):  # nothing is asked of the engine meanwhile
            await asyncio.sleep(0.01)
            if not last.state.num_held:
                break
        await engine.close()
        return last.state

    assert asyncio.run(main()).num_held == 0
