"""Recorded traces as workloads. A file is one of four kinds, told by what is in it; it may be gzipped.

| kind | a line is | a job is | jobs come |
| --- | --- | --- | --- |
| sessions | a coding session: requests' lengths and blocks' ids | a session, and each of its subagents | at random |
| programs | a run of an agent: turns' lengths, and tools' seconds | a run | at random |
| mooncake | a request: its lengths and its blocks' ids | a request | as recorded |
| azure | a request: its lengths (CSV) | a request | as recorded |

No trace has words. Equal block ids are equal text, and all other text is nobody else's.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from segue.base.errors import InvalidRequest
from segue.bench.arrivals import arrival_times
from segue.bench.measures import percentile
from segue.bench.workload import Job, Run, Turn, Workload
from segue.toolcalls.uses import use_of_call

_TEXTS = 1 << 48  # texts below are of generated workloads, and of answers
_MOST = 1 << 44  # of anything: with blocks as below, a token's place in its text stays under 2**63
_MOST_BLOCK = 1 << 16
_MOONCAKE_BLOCK = 512
_CHARS_PER_TOKEN = 4


def read_trace(
    path: Path,
    *,
    limit: int | None = None,
    max_tokens: int | None = None,
    rate: float | None = None,
    seed: int = 0,
    time_scale: float = 1.0,
) -> Workload:
    """The first `limit` jobs without a sequence over `max_tokens`; `settings["left_out"]` counts the ones passed over.

    `rate`: sessions and programs were recorded without their times of arrival, and so many lines (default 1) come a
    second, as in a Poisson process. Times that were recorded are stretched to so many jobs a second. The first job
    comes at 0. `time_scale` multiplies jobs' gaps and how long after its session a subagent comes, not recorded
    arrivals.
    """
    _check_options(limit, max_tokens, rate, time_scale)
    kind, entries = _recognised(path)
    found, left_out = _fitting(kind, entries, limit, max_tokens)
    if not found and left_out:
        raise InvalidRequest("max_tokens", f"each of the {left_out} jobs of {path.name} is longer than {max_tokens}")
    if not found:
        raise InvalidRequest("trace", f"{path.name} has no requests")
    if time_scale != 1.0:
        found = [_Found(each.group, _slowed(each.job, time_scale, kind)) for each in found]
    jobs = _stretched(found, rate) if kind.has_times else _spread(found, 1.0 if rate is None else rate, seed)
    settings = {"trace": path.name, "format": kind.name, "left_out": left_out, "limit": limit, "max_tokens": max_tokens}
    settings |= {"rate": rate, "seed": seed, "time_scale": time_scale}
    return Workload(f"replay {Path(path.name.removesuffix('.gz')).stem}", tuple(jobs), settings=settings)


def describe(workload: Workload) -> dict[str, Any]:
    """How many, how long and how far apart. A gap is between two turns of a job, in seconds."""
    prompts = [length for job in workload.jobs for length in job.prompt_lengths()]
    outputs = [turn.num_output for job in workload.jobs for turn in job.turns]
    gaps = [turn.gap_seconds for job in workload.jobs for turn in job.turns[:-1]]
    return {
        "name": workload.name,
        "jobs": len(workload.jobs),
        "turns": len(prompts),
        "max_tokens": workload.max_tokens,
        "jobs_per_second": workload.rate,
        "prompt_tokens": _summary(prompts),
        "output_tokens": _summary(outputs),
        "gap_seconds": _summary(gaps),
        **{name: workload.settings[name] for name in ("format", "left_out") if name in workload.settings},
    }


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {
        "count": len(values),
        "mean": sum(values) / len(values) if values else 0.0,
        "p50": percentile(values, 0.5),
        "max": max(values, default=0.0),
    }


def _check_options(limit: int | None, max_tokens: int | None, rate: float | None, time_scale: float) -> None:
    for name, count in (("limit", limit), ("max_tokens", max_tokens)):
        if count is not None and count < 1:
            raise InvalidRequest(name, f"must be at least 1, got {count}")
    if rate is not None and not 1e-9 <= rate <= 1e9:
        raise InvalidRequest("rate", f"must be above 0 jobs a second, got {rate}")
    if not 0 <= time_scale <= 1e9:
        raise InvalidRequest("time_scale", f"must be at least 0, got {time_scale}")


# Which jobs, and when


class _Found(NamedTuple):
    """`group`: jobs of one line come together, each so long after its start as `job.at` says."""

    group: int
    job: Job


def _fitting(
    kind: _Kind, entries: Iterable[_Entry], limit: int | None, max_tokens: int | None
) -> tuple[list[_Found], int]:
    """The first jobs that fit, and how many did not. Nothing after the last of them is looked at."""
    found: list[_Found] = []
    left_out = 0
    ids: set[str] = set()
    for number, entry in enumerate(entries):
        for job in kind.jobs(entry, number):
            if job.id in ids:
                raise InvalidRequest("trace", f"{entry.place}the id {job.id!r:.80} was there before")
            ids.add(job.id)
            if max_tokens is not None and _longest(job) > max_tokens:
                left_out += 1
                continue
            found.append(_Found(number, job))
            if len(found) == limit:
                return found, left_out
    return found, left_out


def _longest(job: Job) -> int:
    return max(length + turn.num_output for length, turn in zip(job.prompt_lengths(), job.turns, strict=True))


def _slowed(job: Job, scale: float, kind: _Kind) -> Job:
    turns = tuple(replace(turn, gap_seconds=turn.gap_seconds * scale) for turn in job.turns)
    return replace(job, turns=turns, at=job.at if kind.has_times else job.at * scale)


def _spread(found: list[_Found], rate: float, seed: int) -> list[Job]:
    groups = list(dict.fromkeys(each.group for each in found))
    times = arrival_times("poisson", rate, len(groups) / rate, seed)
    begins = {group: at - times[0] for group, at in zip(groups, times, strict=True)}
    return _from_zero(replace(each.job, at=begins[each.group] + each.job.at) for each in found)


def _stretched(found: list[_Found], rate: float | None) -> list[Job]:
    jobs = _from_zero(each.job for each in found)
    if rate is None or len(jobs) == 1:
        return jobs
    if not jobs[-1].at:
        raise InvalidRequest("rate", f"the {len(jobs)} jobs come all at once, which cannot be stretched: take more")
    factor = (len(jobs) - 1) / rate / jobs[-1].at
    return [replace(job, at=job.at * factor) for job in jobs]


def _from_zero(jobs: Iterable[Job]) -> list[Job]:
    """In order of arrival, the first at 0."""
    ordered = sorted(jobs, key=lambda job: job.at)
    return [replace(job, at=job.at - ordered[0].at) for job in ordered]


# Text


class _Fresh:
    """A text of which no token is taken twice."""

    def __init__(self, text: int) -> None:
        self._text = text
        self._num_taken = 0

    def take(self, length: int) -> tuple[Run, ...]:
        self._num_taken += length
        return (Run(self._text, self._num_taken - length, length),) if length else ()


def _blocks(text: int, size: int, spans: Iterable[tuple[int, int]]) -> list[Run]:
    """Block i is tokens i·size … of the text, so that blocks with consecutive ids are one run."""
    return [Run(text, first * size, count * size) for first, count in spans]


def _cut(runs: Iterable[Run], length: int, fresh: _Fresh) -> tuple[Run, ...]:
    """Their first `length` tokens, made up with fresh ones if there are fewer."""
    cut: list[Run] = []
    for run in runs:
        if taken := min(run.length, length):
            cut.append(run._replace(length=taken))
            length -= taken
    return (*cut, *fresh.take(length))


# Sessions


def _session(entry: _Entry, number: int) -> Iterator[Job]:
    """A session, then its subagents, and theirs. They share its blocks' ids.

    A subagent is a job of its own: it has its own conversation, and runs while others do. It comes as long after its
    session as it was recorded to, however far the session has got by then; the session's gaps include the wait for it.
    Its `t` is when it was heard of: at its end if it has a duration, and else, as it was only sent off, at its start.
    """
    size = entry.whole("block_size", 1, _MOST_BLOCK)
    text, fresh = _TEXTS + 2 * number, _Fresh(_TEXTS + 2 * number + 1)
    waiting = deque([(entry, entry.text("id"), 0.0)])
    while waiting:
        agent, name, at = waiting.popleft()
        requests = []
        for each in agent.entries("requests"):
            if each.members.get("type") != "subagent":
                requests.append(each)
                continue
            began = each.number("t") - (each.optional("duration_ms") or 0.0) / 1000
            waiting.append((each, f"{name}/{each.text('agent_id')}", at + max(began, 0.0)))
        if requests:
            yield Job(name, tuple(_session_turns(requests, text, size, fresh)), at)


def _session_turns(requests: list[_Entry], text: int, size: int, fresh: _Fresh) -> Iterator[Turn]:
    """Only whole blocks have ids. What a prompt has beyond them is fresh, since no later request keeps it."""
    prompt = num_blocks = 0
    for request, following in zip_longest(requests, requests[1:]):
        keep, spans = request.whole("keep"), request.spans("add")
        if keep > num_blocks:
            raise request.bad("keep", f"must be at most the {num_blocks} blocks of the request before")
        num_blocks = keep + sum(count for _, count in spans)
        before, prompt = prompt, request.whole("in", 1)
        kept = min(keep * size, before, prompt)
        added = _cut(_blocks(text, size, spans), prompt - kept, fresh)
        gap = _think_seconds(request, following) if following is not None else 0.0
        tool = "tool" if following is not None and request.members.get("stop") == "tool_use" else ""
        yield Turn(added, max(request.whole("out"), 1), gap, tool, keep=kept)


def _think_seconds(request: _Entry, following: _Entry) -> float:
    """`think_time` counts from the last request whose end is known. Where this one's is not (it has no `api_time`),
    that was an earlier one, and the gap is at most the time between the two."""
    between = max(following.number("t") - request.number("t"), 0.0)
    api_seconds = request.optional("api_time")
    think_seconds = following.optional("think_time")
    if think_seconds is None:
        return max(between - (api_seconds or 0.0), 0.0)
    return think_seconds if api_seconds is not None else min(think_seconds, between)


# Programs


def _program(entry: _Entry, number: int) -> Iterator[Job]:
    """A run's main conversation. Side turns are left out: several side conversations may go on at once, and turns do
    not say of which they are; their time is in the gap of the turn that began them. A turn without input is left out
    too: it is the client's own words. Runs share no text, though their instructions may have been the same."""
    fresh = _Fresh(_TEXTS + number)
    turns: list[Turn] = []
    prompts: list[int] = []
    said = 0  # tokens, with the last answer
    for each in entry.entries("turns"):
        if each.flag("side") or not (prompt := each.whole("in_total")):
            continue
        keep = None if prompt > said else _kept(each, prompt, prompts)
        tools = list(each.entries("tools"))
        added = fresh.take(prompt - (said if keep is None else keep))
        turns.append(Turn(added, _num_output(each, tools), _away_seconds(tools), *_use(tools), keep=keep))
        prompts.append(prompt)
        said = prompt + turns[-1].num_output
    if turns:
        turns[-1] = replace(turns[-1], gap_seconds=0.0, tool="", command="")
        yield Job(entry.text("run"), tuple(turns))


def _kept(turn: _Entry, prompt: int, prompts: list[int]) -> int:
    """How much of what was said a prompt keeps that is no longer than it. If it is as long as the prompt before, that
    one is kept, and the answer came back shorter: without its thoughts. Else the context was compacted: kept is what
    was read from the cache, or, where that is not known, the first prompt, with the instructions and the task."""
    if prompt >= prompts[-1]:
        return prompts[-1]
    cached = turn.optional("cache_read")
    return min(int(prompts[0] if cached is None else cached), prompt)


def _num_output(turn: _Entry, tools: list[_Entry]) -> int:
    """Streamed answers were often counted after their first words: what was written is counted too."""
    chars = turn.whole("text_chars") + sum(tool.whole("input_chars") for tool in tools)
    return max(turn.whole("out"), round(chars / _CHARS_PER_TOKEN), 1)


def _away_seconds(tools: list[_Entry]) -> float:
    """From the first tool's start to the last one's end; of tools that do not say when they started, the longest."""
    seconds = [tool.optional("dur") or 0.0 for tool in tools]
    if any(tool.members.get("t") is None for tool in tools):
        return max(seconds, default=0.0)
    starts = [tool.time("t") for tool in tools]
    after = [(start - min(starts)).total_seconds() for start in starts]
    return max((start + each for start, each in zip(after, seconds, strict=True)), default=0.0)


def _use(tools: list[_Entry]) -> tuple[str, str]:
    """The tool that took longest, and its command if it is a shell."""
    if not tools:
        return "", ""
    longest = max(tools, key=lambda tool: tool.optional("dur") or 0.0)
    use = use_of_call(longest.text("name"), {"command": longest.text("cmd") if longest.members.get("cmd") else ""})
    return use.tool, use.command


# Single requests


def _mooncake(entry: _Entry, number: int) -> Iterator[Job]:
    """Blocks' ids are the same in all requests; the last block may be cut."""
    runs = _blocks(_TEXTS, _MOONCAKE_BLOCK, _consecutive(entry.ids("hash_ids")))
    added = _cut(runs, entry.whole("input_length", 1), _Fresh(_TEXTS + 1 + number))
    yield _request(number, added, entry.whole("output_length"), entry.number("timestamp") / 1000)


def _azure(entry: _Entry, number: int) -> Iterator[Job]:
    added = _Fresh(_TEXTS + number).take(entry.whole("ContextTokens", 1))
    yield _request(number, added, entry.whole("GeneratedTokens"), entry.time("TIMESTAMP").timestamp())


def _request(number: int, added: tuple[Run, ...], num_output: int, at: float) -> Job:
    return Job(f"request-{number:05d}", (Turn(added, max(num_output, 1)),), at)


def _consecutive(ids: Iterable[int]) -> list[tuple[int, int]]:
    """(first, count) of each stretch of ids that go up by one."""
    spans: list[tuple[int, int]] = []
    for each in ids:
        if spans and each == sum(spans[-1]):
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((each, 1))
    return spans


# Files


class _Kind(NamedTuple):
    """`marks`: a file whose first entry has one of these members is of this kind. `jobs`: of an entry and its number.
    Their `at` is the recorded time; where there is none, seconds after the first job of the entry."""

    name: str
    marks: frozenset[str]
    jobs: Callable[[_Entry, int], Iterator[Job]]
    has_times: bool


_KINDS = (
    _Kind("sessions", frozenset({"requests", "block_size"}), _session, has_times=False),
    _Kind("programs", frozenset({"turns", "run"}), _program, has_times=False),
    _Kind("mooncake", frozenset({"hash_ids", "input_length", "output_length"}), _mooncake, has_times=True),
    _Kind("azure", frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _azure, has_times=True),
)


def _recognised(path: Path) -> tuple[_Kind, Iterator[_Entry]]:
    text = _read(path)
    entries = _json_entries if text.lstrip()[:1] in ("{", "[") else _csv_entries
    first = next(entries(text, path.name), None) if text.strip() else None
    if first is None:
        raise InvalidRequest("trace", f"{path.name} has no entries")
    for kind in _KINDS:
        if kind.marks.intersection(first.members):
            return kind, entries(text, path.name)
    known = "; ".join(f"{kind.name} with {', '.join(sorted(kind.marks))}" for kind in _KINDS)
    raise InvalidRequest("trace", f"{first.place}is of no known kind, which are {known}")


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        return data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidRequest("trace", f"{path.name} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidRequest("trace", f"{path.name}, line {line}: is no text in UTF-8") from error


def _json_entries(text: str, file: str) -> Iterator[_Entry]:
    """Lines end with a newline only: JSON may hold other characters that end lines elsewhere."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{file}, line {number}: "
        try:
            members = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("trace", f"{place}is no JSON: {getattr(error, 'msg', error)}") from error
        if not isinstance(members, dict):
            raise InvalidRequest("trace", f"{place}must be a JSON object, got {members!r:.40}")
        yield _Entry(members, place)


def _csv_entries(text: str, file: str) -> Iterator[_Entry]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    try:
        for row in rows:
            members = {str(name): _value(value) for name, value in row.items() if value is not None}
            yield _Entry(members, f"{file}, line {rows.line_num}: ")
    except csv.Error as error:
        raise InvalidRequest("trace", f"{file}, line {rows.line_num}: is no CSV: {error}") from error


def _value(text: Any) -> Any:
    """Of a CSV's cell: what is no whole number stays text, and is refused where one must be."""
    return int(text) if isinstance(text, str) and len(text) < 20 and text.isascii() and text.isdigit() else text


@dataclass(frozen=True, slots=True)
class _Entry:
    """An object of a trace, and where it is: a bad value is named with its line and field. Null is missing."""

    members: Mapping[str, Any]
    place: str  # a member's name can follow

    def bad(self, name: str, why: str) -> InvalidRequest:
        value = self.members.get(name)
        return self._bad(name, "is missing" if value is None else f"{why}, got {value!r:.40}")

    def whole(self, name: str, least: int = 0, most: int = _MOST) -> int:
        value = self.members.get(name)
        if not _is_whole(value, least, most):
            raise self.bad(name, f"must be a whole number from {least} to {most}")
        return value

    def number(self, name: str) -> float:
        value = self.members.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST:
            raise self.bad(name, f"must be a number from 0 to {_MOST}")
        return float(value)

    def optional(self, name: str) -> float | None:
        """A number, if there is one."""
        return None if self.members.get(name) is None else self.number(name)

    def text(self, name: str) -> str:
        value = self.members.get(name)
        if not isinstance(value, str) or not value:
            raise self.bad(name, "must be some text")
        return value

    def flag(self, name: str) -> bool:
        """False if missing."""
        value = self.members.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.bad(name, "must be true or false")
        return bool(value)

    def time(self, name: str) -> datetime:
        try:
            moment = datetime.fromisoformat(self.text(name))
        except ValueError as error:
            raise self.bad(name, "must be a date and time") from error
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)

    def ids(self, name: str) -> list[int]:
        values = self._list(name)
        for at, value in enumerate(values):
            if not _is_whole(value):
                raise self._bad(f"{name}[{at}]", f"must be a whole number from 0 to {_MOST}, got {value!r:.40}")
        return values

    def spans(self, name: str) -> list[tuple[int, int]]:
        """Pairs of a first id and a count."""
        values = self._list(name)
        for at, value in enumerate(values):
            if not isinstance(value, list) or len(value) != 2 or not all(map(_is_whole, value)):
                raise self._bad(f"{name}[{at}]", f"must be a first id and a count, got {value!r:.40}")
        return [(first, count) for first, count in values]

    def entries(self, name: str) -> Iterator[_Entry]:
        for at, value in enumerate(self._list(name)):
            if not isinstance(value, dict):
                raise self._bad(f"{name}[{at}]", f"must be an object, got {value!r:.40}")
            yield _Entry(value, f"{self.place}{name}[{at}].")

    def _list(self, name: str) -> list[Any]:
        values = self.members.get(name)
        if not isinstance(values, list):
            raise self.bad(name, "must be a list")
        return values

    def _bad(self, name: str, why: str) -> InvalidRequest:
        return InvalidRequest("trace", f"{self.place}{name} {why}")


def _is_whole(value: object, least: int = 0, most: int = _MOST) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
