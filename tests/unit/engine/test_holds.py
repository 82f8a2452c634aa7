"""Jobs: a turn gives back what it went on from, a turn beside it keeps its own, the last step leaves nothing."""

from segue.engine import holds as holds_module
from segue.engine.holds import JobHolds


def test_a_turn_gives_back_what_the_job_held_when_it_came():
    jobs = JobHolds()
    jobs.begin("1", "s", "job", is_last=False)
    assert jobs.end("1", ["state-1"]) == ("s", [])
    jobs.begin("2", "s", "job", is_last=False)
    jobs.begin("3", "s", "job", is_last=False)
    assert jobs.end("3", ["state-3"]) == ("s", ["state-1"])
    assert jobs.end("2", ["state-2"]) == ("s", [])  # state-1 is gone already, and state-3 is not its business
    jobs.begin("4", "s", "job", is_last=True)
    salt, released = jobs.end("4", ["state-4"])
    assert (salt, sorted(released)) == ("s", ["state-2", "state-3", "state-4"])
    jobs.begin("5", "s", "job", is_last=True)
    assert jobs.end("5", []) == ("s", [])


def test_a_turn_that_came_to_nothing_changes_nothing():
    jobs = JobHolds()
    jobs.begin("1", "s", "job", is_last=False)
    jobs.end("1", ["state-1"])
    jobs.begin("2", "s", "job", is_last=True)
    jobs.forget("2")
    assert jobs.end("2", []) == ("", [])
    jobs.begin("3", "s", "job", is_last=True)
    assert jobs.end("3", []) == ("s", ["state-1"])


def test_jobs_of_other_scopes_are_other_jobs_and_requests_without_a_job_are_none():
    jobs = JobHolds()
    jobs.begin("1", "mine", "job", is_last=False)
    jobs.end("1", ["state-1"])
    jobs.begin("2", "yours", "job", is_last=True)
    assert jobs.end("2", []) == ("yours", [])
    assert jobs.end("never begun", ["x"]) == ("", [])


def test_jobs_that_never_end_are_forgotten_in_time(monkeypatch):
    monkeypatch.setattr(holds_module, "_MOST_JOBS", 100)
    jobs = JobHolds()
    for number in range(1000):
        jobs.begin("r", "s", f"job {number}", is_last=False)
        jobs.end("r", [f"state {number}"])
    assert len(jobs._held) == 100 and not jobs._turns
