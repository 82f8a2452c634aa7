import asyncio
import threading

import pytest

from segue.base.config import EngineConfig
from segue.base.errors import EngineClosed, InvalidRequest, StepFailed
from segue.base.types import SamplingParams
from segue.engine import AsyncEngine, EngineCore
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
