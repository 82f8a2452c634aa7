"""Think, then search for items: the same users served in different ways, by one server.

    resend         the thought comes back as text, and goes out again with the prompt; nothing is cached
    prefix-cache   the same, and the server may find what it has computed before
    continuation   the thought's state is held, and the search names it
    fused          one request: the engine goes over from the thought to the search in place

With pressure, everything that can be evicted is, between the two stages. What is found must not depend on the way.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from segue.base.errors import InvalidRequest, SegueError
from segue.bench.measures import hit, ndcg, percentile, recall

MODES = ("resend", "prefix-cache", "continuation", "fused")
CUTS = (1, 5, 10)
_HOLD_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class User:
    prompt: str
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """What `examples/recommender/make.py` writes: a model, its items, and people to recommend them to."""

    folder: Path
    users: list[User]
    items: dict[str, str]  # by name, the text of an item's ids
    popular: list[str]
    suffix: str
    stop: str
    max_thought_tokens: int
    item_tokens: int

    @classmethod
    def read(cls, folder: Path) -> Task:
        try:
            about = json.loads((folder / "task.json").read_text())
            lines = (folder / "users.jsonl").read_text().splitlines()
            users = [User(row["prompt"], tuple(row["targets"])) for row in map(json.loads, lines)]
            names = ("items", "popular", "suffix", "stop", "max_thought_tokens", "item_tokens")
            return cls(folder, users, *(about[name] for name in names))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidRequest("task", f"{folder} is no task of the recommender's: {error}") from error


@dataclass(frozen=True, slots=True)
class Load:
    """How a task is played."""

    width: int = 32
    thoughts: int = 1
    concurrency: int = 4
    catalogue: str | None = "items"  # None: any line may be found
    pressure: bool = False
    temperature: float = 0.7
    seed: int = 0


@dataclass(slots=True)
class Measured:
    """Of one mode. Lists have an entry for each user."""

    mode: str
    rankings: list[list[str | None]] = field(default_factory=list)  # None: a line that is no item
    think_seconds: list[float] = field(default_factory=list)
    search_seconds: list[float] = field(default_factory=list)
    prefilled: list[int] = field(default_factory=list)  # tokens computed before the search's first step
    wall_seconds: float = 0.0

    def report(self, users: list[User]) -> dict[str, Any]:
        pairs = list(zip(self.rankings, (user.targets for user in users), strict=True))
        lines = [item for ranking in self.rankings for item in ranking]
        quality = {
            f"{name}@{k}": sum(measure(ranking, targets, k) for ranking, targets in pairs) / len(pairs)
            for name, measure in (("recall", recall), ("ndcg", ndcg), ("pass", hit))
            for k in CUTS
        }
        return (
            {"mode": self.mode}
            | quality
            | {
                "illegal_share": sum(item is None for item in lines) / max(len(lines), 1),
                "think_p50_ms": percentile(self.think_seconds, 0.5) * 1e3,
                "think_p99_ms": percentile(self.think_seconds, 0.99) * 1e3,
                "search_p50_ms": percentile(self.search_seconds, 0.5) * 1e3,
                "search_p99_ms": percentile(self.search_seconds, 0.99) * 1e3,
                "requests_per_second": len(pairs) / self.wall_seconds if self.wall_seconds else 0.0,
                "search_prefill_min": min(self.prefilled, default=0),
                "search_prefill_mean": sum(self.prefilled) / max(len(self.prefilled), 1),
                "search_prefill_max": max(self.prefilled, default=0),
            }
        )


class Player:
    """Plays a task against a server. `ours`: it has states, catalogues and /v1/recommend; others have beam search at most."""

    def __init__(self, client: httpx.AsyncClient, task: Task, load: Load, *, ours: bool) -> None:
        self._client = client
        self._task = task
        self._load = load
        self._ours = ours
        self._salt: dict[str, Any] = {}
        self._name_of = {text: name for name, text in task.items.items()}

    async def play(self, mode: str, num_users: int) -> Measured:
        if mode not in MODES:
            raise InvalidRequest("modes", f"{mode!r} is not one of {', '.join(MODES)}")
        if not self._ours and mode in ("continuation", "fused"):
            raise InvalidRequest("modes", f"{mode} needs a Segue server")
        measured = Measured(mode)
        slots = asyncio.Semaphore(self._load.concurrency)
        users = self._task.users[:num_users]
        results: list[_One | None] = [None] * len(users)
        self._salt = {"cache_salt": secrets.token_hex(8)} if self._ours else {}  # nothing is left of an earlier mode
        serve = {"fused": self._fused, "continuation": self._continued}.get(mode, self._resent)

        async def one(number: int) -> None:
            async with slots:
                results[number] = await serve(users[number], number, mode)

        began = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(len(users))))
        measured.wall_seconds = time.perf_counter() - began
        for result in results:
            assert result is not None
            measured.rankings.append(result.ranking)
            measured.think_seconds.append(result.think_seconds)
            measured.search_seconds.append(result.search_seconds)
            measured.prefilled.append(result.prefilled)
        return measured

    # Ways

    async def _resent(self, user: User, number: int, mode: str) -> _One:
        """Each thought is a prompt of its own in the second stage."""
        salt = {"cache_salt": secrets.token_hex(8)} if mode == "resend" and self._ours else self._salt
        began = time.perf_counter()
        thoughts = await self._think(user, number, salt)
        thought_at = time.perf_counter()
        await self._evict()
        resumed_at = time.perf_counter()
        lines: list[_Line] = []
        prefilled = 0
        for choice in thoughts["choices"]:
            again = {"cache_salt": secrets.token_hex(8)} if mode == "resend" and self._ours else salt
            prompt = user.prompt + choice["text"] + self._task.suffix
            found = await self._post("/v1/completions", self._search() | {"prompt": prompt} | again)
            lines += self._lines(found)
            prefilled += _prefilled(found)
        return _One(self._ranked(lines), thought_at - began, time.perf_counter() - resumed_at, prefilled)

    async def _continued(self, user: User, number: int, mode: str) -> _One:
        """A thought that was stopped ends with the stop, which the suffix must not repeat."""
        began = time.perf_counter()
        thoughts = await self._think(user, number, self._salt | {"hold_seconds": _HOLD_SECONDS})
        thought_at = time.perf_counter()
        await self._evict()
        resumed_at = time.perf_counter()
        lines: list[_Line] = []
        prefilled = 0
        for choice in thoughts["choices"]:
            suffix = self._task.suffix
            if choice["finish_reason"] == "stop":
                suffix = suffix.removeprefix(self._task.stop)
            parent = {"continuation_of": choice["state"]["id"], "continuation_suffix": suffix}
            found = await self._post("/v1/completions", self._search() | parent | self._salt)
            lines += self._lines(found)
            prefilled += _prefilled(found)
        taken = time.perf_counter() - resumed_at
        for choice in thoughts["choices"]:
            await self._post(f"/v1/states/release/{choice['state']['id']}", self._salt)
        return _One(self._ranked(lines), thought_at - began, taken, prefilled)

    async def _fused(self, user: User, number: int, mode: str) -> _One:
        """Where the thought ends, only the engine sees: all of the time counts as the search's."""
        load, task = self._load, self._task
        beam = {"width": load.width, "max_tokens": task.item_tokens, "ignore_eos": True}
        body = {
            "prompt": user.prompt,
            "think": self._sampling(number) | {"n": load.thoughts},
            "suffix": task.suffix,
            "beam": beam | ({"catalogue": load.catalogue} if load.catalogue else {}),
        } | self._salt
        began = time.perf_counter()
        found = await self._post("/v1/recommend", body)
        ranking = [self._name_of.get(row["text"]) for row in found["data"]]
        return _One(ranking, 0.0, time.perf_counter() - began, found["usage"]["search_prefill_tokens"])

    # Parts

    async def _think(self, user: User, number: int, more: dict[str, Any]) -> dict[str, Any]:
        body = {"prompt": user.prompt, "n": self._load.thoughts} | self._sampling(number) | more
        return await self._post("/v1/completions", body)

    def _sampling(self, number: int) -> dict[str, Any]:
        return {
            "temperature": self._load.temperature,
            "seed": self._load.seed + number,
            "max_tokens": self._task.max_thought_tokens,
            "stop": self._task.stop,
        }

    def _search(self) -> dict[str, Any]:
        load = self._load
        body: dict[str, Any] = {
            "use_beam_search": True,
            "n": load.width,
            "temperature": 0,
            "max_tokens": self._task.item_tokens,
        }
        if self._ours:
            body |= {"ignore_eos": True} | ({"catalogue": load.catalogue} if load.catalogue else {})
        return body

    def _lines(self, found: dict[str, Any]) -> list[_Line]:
        """Without scores, lines are taken to come in their order."""
        return [
            _Line(choice["text"], choice.get("score", -float(rank))) for rank, choice in enumerate(found["choices"])
        ]

    def _ranked(self, lines: list[_Line]) -> list[str | None]:
        """Each line once, by its best score: what a server does that merges them itself."""
        best: dict[str, float] = {}
        for line in lines:
            best[line.text] = max(line.score, best.get(line.text, -float("inf")))
        texts = sorted(best, key=lambda text: -best[text])[: self._load.width]
        return [self._name_of.get(text) for text in texts]

    async def _evict(self) -> None:
        if self._load.pressure:
            await self._post("/v1/tiers/reset" if self._ours else "/reset_prefix_cache", {})

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._client.post(path, json=body)
        if response.status_code != 200:
            raise SegueError(f"{path} answered {response.status_code}: {response.text[:300]}")
        answer: dict[str, Any] = response.json() if response.content else {}
        return answer


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class _One:
    ranking: list[str | None]
    think_seconds: float
    search_seconds: float
    prefilled: int


def _prefilled(found: dict[str, Any]) -> int:
    usage = found["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return int(usage["prompt_tokens"] - cached)


def popularity(task: Task, num_users: int) -> dict[str, float]:
    """What recommending the best-selling items to everybody would reach."""
    users = task.users[:num_users]
    return {f"recall@{k}": sum(recall(task.popular, user.targets, k) for user in users) / len(users) for k in CUTS}
