"""Workloads on any OpenAI-compatible server, in real time: ours, vLLM, or another that completes text."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from segue.base.errors import InvalidRequest, SegueError
from segue.bench.play import Played, TurnRecord
from segue.bench.workload import Job, Run, Texts, Turn, Workload

# Common words, each one token to most tokenizers, so that texts are about as long as the workload says.
_TEXT = """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service friend
    father power hour game line end member law car city community name president team minute idea body information
    back parent face level office door health person art war history party result change morning reason research
    girl moment air teacher force education
"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Server:
    """`ours`: it knows jobs. `model`: as requests name it; None asks the server."""

    url: str
    model: str | None = None
    ours: bool = True
    api_key: str | None = None
    timeout: float = 600.0


@dataclass(slots=True)
class _Said:
    """A conversation as words; an answer counts as many as it has tokens, and its text is in the first."""

    words: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "".join(self.words)


@dataclass(slots=True)
class _Answer:
    text: str
    first_at: float
    num_prompt: int
    num_output: int
    num_cached: int


class ServedPlayer:
    """A task for each job. What a server's counters say of its engine is not known here."""

    def __init__(
        self, workload: Workload, server: Server, *, progress: Callable[[int, int], None] | None = None
    ) -> None:
        self._workload = workload
        self._server = server
        self._progress = progress
        self._texts = Texts(len(WORDS) + 10)
        self._began = 0.0
        self._model = server.model
        self.played = Played()

    async def play(self) -> Played:
        server = self._server
        headers = {"authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=server.url, timeout=server.timeout, headers=headers, limits=limits
        ) as client:
            if self._model is None:
                self._model = await _first_model(client)
            self._began = time.monotonic()
            await self._all_jobs(client)
        played = self.played
        played.wall_seconds = time.monotonic() - self._began
        played.num_computed = sum(turn.num_prompt - turn.num_reused + turn.num_output - 1 for turn in played.turns)
        played.num_recomputed = sum(turn.num_lost for turn in played.turns)
        return played

    async def _all_jobs(self, client: httpx.AsyncClient) -> None:
        slots = asyncio.Semaphore(self._workload.concurrency or len(self._workload.jobs))

        async def one(job: Job) -> None:
            async with slots:
                if self._workload.concurrency is None:
                    await asyncio.sleep(max(self._began + job.at - time.monotonic(), 0.0))
                await self._job(client, job)
            if self._progress is not None:
                self._progress(len(self.played.durations) + len(self.played.failed), len(self._workload.jobs))

        await asyncio.gather(*(one(job) for job in self._workload.jobs))

    async def _job(self, client: httpx.AsyncClient, job: Job) -> None:
        said, began, num_kv = _Said(), time.monotonic(), 0
        try:
            for number, turn in enumerate(job.turns):
                num_kv = await self._turn(client, job, number, turn, said, num_kv)
                if number < len(job.turns) - 1:
                    await asyncio.sleep(turn.gap_seconds)
        except (SegueError, httpx.HTTPError) as error:
            self.played.failed[job.id] = str(error) or type(error).__name__
            return
        self.played.durations[job.id] = time.monotonic() - began

    async def _turn(
        self, client: httpx.AsyncClient, job: Job, number: int, turn: Turn, said: _Said, num_kv: int
    ) -> int:
        """What the server should have KV for afterwards, in tokens."""
        if turn.keep is not None:
            del said.words[turn.keep :]
            num_kv = min(num_kv, turn.keep)
        for run in turn.added:
            said.words += self._words(run)
        body = self._body(job, number, turn, str(said))
        asked_at = time.monotonic()
        answer = await self._ask(client, body)
        ended_at = time.monotonic()
        lost = max(num_kv - answer.num_cached, 0)
        since = self._began
        self.played.turns.append(
            TurnRecord(
                job.id,
                number,
                asked_at - since,
                answer.first_at - since,
                ended_at - since,
                answer.num_prompt,
                answer.num_output,
                answer.num_cached,
                lost,
            )
        )
        if not turn.beam_width:
            said.words += [answer.text] + [""] * (turn.num_output - 1)
        return answer.num_prompt + (0 if turn.beam_width else answer.num_output - 1)

    def _words(self, run: Run) -> list[str]:
        return [f" {WORDS[token - 10]}" for token in self._texts.tokens(run)]

    def _body(self, job: Job, number: int, turn: Turn, prompt: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": turn.num_output,
            "ignore_eos": True,
        }
        if turn.beam_width:
            return body | {"use_beam_search": True, "n": turn.beam_width, "temperature": 0} | self._about(job, number)
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        return body | self._about(job, number)

    def _about(self, job: Job, number: int) -> dict[str, Any]:
        is_last = number == len(job.turns) - 1
        return {"job_id": job.id, "is_last_step": is_last} if self._server.ours else {}

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> _Answer:
        if not body.get("stream"):
            response = await client.post("/v1/completions", json=body)
            await _check(response)
            data = response.json()
            return _answer("", time.monotonic(), data.get("usage") or {}, body)
        first_at: float | None = None
        text: list[str] = []
        usage: dict[str, Any] = {}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            await _check(response)
            async for data in _events(response):
                usage = data.get("usage") or usage
                for choice in data.get("choices", ()):
                    first_at = first_at or time.monotonic()
                    text.append(choice.get("text") or "")
        return _answer("".join(text), first_at or time.monotonic(), usage, body)


def _answer(text: str, first_at: float, usage: dict[str, Any], body: dict[str, Any]) -> _Answer:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    prompt = int(usage.get("prompt_tokens", 0))
    return _Answer(text, first_at, prompt, max(int(usage.get("completion_tokens", body["max_tokens"])), 1), int(cached))


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in _lines(response.aiter_bytes()):
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            parsed = json.loads(data)
            if "error" in parsed:
                raise SegueError(f"the server ended the answer: {parsed['error']}")
            yield parsed


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Ended by a newline and nothing else: httpx's own end at U+2028 and others too, which stand in JSON as they are."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


async def _check(response: httpx.Response) -> None:
    if response.status_code != 200:
        await response.aread()
        raise SegueError(f"{response.request.url.path} answered {response.status_code}: {response.text[:300]}")


async def _first_model(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("/v1/models")
        await _check(response)
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise InvalidRequest("url", f"{client.base_url} names no model: {type(error).__name__} {error}") from error


def play_served(workload: Workload, server: Server, *, progress: Callable[[int, int], None] | None = None) -> Played:
    return asyncio.run(ServedPlayer(workload, server, progress=progress).play())
