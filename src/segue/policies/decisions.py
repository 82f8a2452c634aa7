"""Every disposition with what was predicted and what came of it: the record, and sums of it for metrics."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from segue.base.types import Scope
from segue.policies.policy import Disposition, TurnEnd

_MOST_RECORDS = 4096
_MOST_TOOLS = 512


@dataclass(slots=True, eq=False)
class Decision:
    """One turn's end, and the gap after it. Times are the engine's clock; `outcome` is open until the job comes back, ends, or
    is forgotten."""

    job_id: str
    salt: str
    tool: str
    key: str
    decided_at: float
    num_blocks: int
    num_tokens: int
    keep_seconds: float
    p_return: float | None
    benefit_seconds: float
    prefetch_seconds: float | None
    why: str
    outcome: str = "open"  # returned (to its pin), late, over (the job said so)
    gap_seconds: float | None = None
    pinned_seconds: float = 0.0  # how long the KV was kept
    hit_tokens: int = 0  # that the next turn found
    block_seconds: float = 0.0  # pinned, in all

    def utility(self, keep_seconds: float) -> float:
        """Of having kept for so long, now that the gap is known: the benefit if it was enough, less the time."""
        assert self.gap_seconds is not None
        gain = self.benefit_seconds if self.gap_seconds <= keep_seconds else 0.0
        return gain - min(self.gap_seconds, keep_seconds)

    @property
    def regret(self) -> float | None:
        """Seconds that an oracle would have gained more; None while the gap is open."""
        if self.gap_seconds is None:
            return None
        return max(0.0, self.benefit_seconds - self.gap_seconds) - self.utility(self.pinned_seconds)

    def to_json(self) -> dict[str, Any]:
        """With the seed documents' names for what they have, too."""
        return {
            "job_id": self.job_id,
            "tool": self.tool,
            "key": self.key,
            "decided_at": round(self.decided_at, 4),
            "num_blocks": self.num_blocks,
            "num_tokens": self.num_tokens,
            "keep_seconds": round(self.keep_seconds, 4),
            "p_return": None if self.p_return is None else round(self.p_return, 4),
            "benefit_seconds": round(self.benefit_seconds, 6),
            "prefetch_seconds": None if self.prefetch_seconds is None else round(self.prefetch_seconds, 4),
            "why": self.why,
            "outcome": self.outcome,
            "gap_seconds": None if self.gap_seconds is None else round(self.gap_seconds, 4),
            "pinned_time": round(self.pinned_seconds, 4),
            "unpinned_time": None if self.gap_seconds is None else round(self.gap_seconds - self.pinned_seconds, 4),
            "hit_length": self.hit_tokens,
            "regret_seconds": None if self.regret is None else round(self.regret, 6),
        }


@dataclass(slots=True)
class Sums:
    """Over all decisions of a tool whose gap has ended, and all block-seconds whose pin has."""

    num_decisions: int = 0
    num_pinned: int = 0
    num_hits: int = 0  # came back to KV that was still kept
    num_late: int = 0  # came back after it had been given up
    used_block_seconds: float = 0.0
    wasted_block_seconds: float = 0.0
    regret_seconds: float = 0.0

    def add(self, decision: Decision) -> None:
        self.num_decisions += 1
        self.regret_seconds += decision.regret or 0.0
        if decision.keep_seconds > 0:
            self.num_pinned += 1
            self.num_hits += decision.outcome == "returned"
            self.num_late += decision.outcome == "late"


class Decisions:
    """The last ones, and sums by tool; both bounded."""

    def __init__(self) -> None:
        self._recent: deque[Decision] = deque(maxlen=_MOST_RECORDS)
        self.sums: OrderedDict[str, Sums] = OrderedDict()

    def __iter__(self) -> Iterator[Decision]:
        """The newest first."""
        return reversed(self._recent)

    def of(self, tenant: str | None = None, job_id: str | None = None) -> Iterator[Decision]:
        """Of one tenant's or one job's only, if asked."""
        for decision in self:
            whose = Scope(decision.salt).tenant
            if (tenant is None or whose == tenant) and (job_id is None or decision.job_id == job_id):
                yield decision

    def add(self, salt: str, job_id: str, end: TurnEnd, disposition: Disposition, now: float) -> Decision:
        call = end.call
        decision = Decision(
            job_id,
            salt,
            call.tool if call is not None else "",
            call.key if call is not None else "",
            now,
            end.num_blocks,
            end.turn.num_computed,
            disposition.keep_seconds,
            disposition.p_return,
            disposition.benefit_seconds,
            disposition.prefetch_seconds,
            disposition.why,
        )
        self._recent.append(decision)
        return decision

    def unpinned(self, decision: Decision) -> None:
        """Its pin has ended, used by the job's next turn if that had come by then."""
        sums = self._sums_of(decision)
        if decision.outcome == "returned":
            sums.used_block_seconds += decision.block_seconds
        else:
            sums.wasted_block_seconds += decision.block_seconds

    def close(self, decision: Decision, outcome: str, gap_seconds: float | None) -> None:
        """The gap is over: the job came back, or said that it will not."""
        decision.outcome, decision.gap_seconds = outcome, gap_seconds
        self._sums_of(decision).add(decision)

    def _sums_of(self, decision: Decision) -> Sums:
        sums = self.sums.get(decision.key)
        if sums is None:
            sums = self.sums[decision.key] = Sums()
            if len(self.sums) > _MOST_TOOLS:
                self.sums.popitem(last=False)
        self.sums.move_to_end(decision.key)
        return sums
