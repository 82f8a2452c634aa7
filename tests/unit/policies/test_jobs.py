"""Jobs whose clients do what they like."""

from hypothesis import given
from hypothesis import strategies as st

from segue.policies import JobBook


def test_a_gap_is_from_the_last_open_turns_end_to_the_next_arrival():
    book = JobBook()
    job, gap = book.begin("", "j", 1.0)
    assert gap is None
    same, gap = book.begin("", "j", 2.0)  # beside the first
    assert same is job and gap is None
    book.end("", job, None, 3.0, is_last=False)
    assert book.begin("", "j", 4.0)[1] is None, "another is still open"
    book.end("", job, None, 5.0, is_last=False)
    book.end("", job, None, 6.0, is_last=False)
    assert book.begin("", "j", 9.5) == (job, 3.5)


def test_a_name_that_is_used_again_is_a_new_job():
    book = JobBook()
    old, _ = book.begin("", "j", 0.0)
    late, _ = book.begin("", "j", 0.0)
    assert book.end("", old, None, 1.0, is_last=True) and len(book) == 0
    new, gap = book.begin("", "j", 2.0)
    assert new is not old and gap is None and new.num_turns == 1
    assert not book.end("", late, None, 3.0, is_last=False), "the old job's straggler"
    assert not book.end("", old, None, 3.0, is_last=True)
    assert book.begin("", "j", 4.0)[0] is new


def test_salts_do_not_share_jobs_and_time_may_stand_still():
    book = JobBook()
    mine, _ = book.begin("a", "j", 5.0)
    assert book.begin("b", "j", 5.0)[0] is not mine
    book.end("a", mine, None, 5.0, is_last=False)
    assert book.begin("a", "j", 4.0)[1] == 0.0, "a clock that went back is a gap of nothing"


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans(), st.booleans()), max_size=200))
def test_memory_is_bounded_and_counts_never_go_wrong(operations):
    book = JobBook(most_jobs=4)
    open_turns = []
    for number, (name, begin, is_last) in enumerate(operations):
        if begin or not open_turns:
            open_turns.append(book.begin("", name, float(number))[0])
        else:
            job = open_turns.pop(0)
            book.end("", job, None, float(number), is_last=is_last)
            assert job.num_open == open_turns.count(job)
        assert len(book) <= 4
