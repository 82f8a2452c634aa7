"""What is known of each job, so that its turns are more than strangers.

Clients are not to be relied on: a job may have no name, several turns at once, ends in any order, no last step, or a second
life under an old name. None of it is an error.
"""

from __future__ import annotations

from collections import OrderedDict

from segue.policies.decisions import Decision
from segue.policies.durations import Call

MOST_JOBS = 100_000


class Job:
    """From its first turn to its last step."""

    __slots__ = (
        "arrived_at",
        "call",
        "decisions",
        "ended_at",
        "id",
        "is_over",
        "key",
        "num_kv",
        "num_open",
        "num_turns",
    )

    def __init__(self, salt: str, job_id: str, now: float) -> None:
        self.id = job_id
        self.key = f"{salt}\0{job_id}"  # unlike any other tenant's
        self.arrived_at = now
        self.num_turns = 0  # begun
        self.num_open = 0  # of these, not ended
        self.ended_at: float | None = None  # when the last open one ended: since then the job is away
        self.call: Call | None = None  # what it is away for
        self.num_kv = 0  # tokens that had KV when its last turn ended
        self.decisions: list[Decision] = []  # about its KV, since it is away
        self.is_over = False


class JobBook:
    """Bounded: the job that was longest without a turn is forgotten. If it comes back, it is a new one."""

    def __init__(self, most_jobs: int = MOST_JOBS) -> None:
        self._jobs: OrderedDict[tuple[str, str], Job] = OrderedDict()
        self._most_jobs = most_jobs

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, salt: str, job_id: str, now: float) -> tuple[Job, float | None]:
        """A turn of a job has come; how long the job was away, if it was."""
        job = self._jobs.get((salt, job_id))
        if job is None:
            job = self._jobs[salt, job_id] = Job(salt, job_id, now)
            if len(self._jobs) > self._most_jobs:
                self._jobs.popitem(last=False)
        self._jobs.move_to_end((salt, job_id))
        gap = max(now - job.ended_at, 0.0) if job.ended_at is not None and not job.num_open else None
        job.num_turns += 1
        job.num_open += 1
        job.ended_at = None
        return job, gap

    def end(self, salt: str, job: Job, call: Call | None, now: float, *, is_last: bool) -> bool:
        """A turn has ended, well or not. True if that was the job's own word for its end."""
        job.num_open -= 1
        if is_last and not job.is_over:
            job.is_over = True
            if self._jobs.get((salt, job.id)) is job:
                del self._jobs[salt, job.id]
            return True
        if not job.num_open:
            job.ended_at, job.call = now, call
        return False
