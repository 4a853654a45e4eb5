import pytest

pytest.importorskip("torch")

from dynarl.roles.training.leases import LeaseQueue  # noqa: E402


def samples(*lengths):
    return [{"sample": f"0:{i}:0", "prompt": b"\0" * 4, "response": b"\0" * (4 * n)} for i, n in enumerate(lengths)]


class Record:
    """A queue that notes what is run: the number of samples of each micro-batch, and which leases are done."""

    def __init__(self):
        self.runs, self.done = [], []
        self.queue = LeaseQueue(
            lambda batches: self.runs.extend(map(len, batches)) or [len(batch) for batch in batches],
            lambda *what: self.done.append(what),
        )

    def work(self, whole=False):
        return self.queue.work(1000, None, whole)


def test_leases_are_worked_off_in_the_order_of_arrival_one_micro_batch_at_a_time():
    record = Record()
    record.queue.add("a", samples(900, 900, 900))
    record.queue.add("b", samples(100))
    assert record.work() and record.done == []
    while record.work():
        pass
    assert record.done == [("a", [1, 1, 1]), ("b", [1])]


def test_a_lease_that_several_workers_do_together_is_run_as_a_whole():
    record = Record()
    record.queue.add("a", samples(900, 900, 900))
    record.queue.add("b", samples(100))
    assert record.work(whole=True) and record.done == [("a", [1, 1, 1])]
    assert not record.work(whole=True) and record.done[1:] == [("b", [1])]


def test_a_lease_that_has_begun_cannot_be_cancelled_and_is_finished():
    record = Record()
    record.queue.add("a", samples(900, 900))
    record.queue.add("b", samples(10))
    record.queue.add("c", samples(10))
    record.work()
    assert record.queue.cancel(["a", "b", "c", "unknown"]) == ["b", "c"]
    assert record.queue.cancel(["b"]) == []
    assert record.queue.drain(1000, None) == ["a"]
    assert record.done == [("a", [1, 1])] and not record.work()


def test_a_cancelled_lease_may_come_again():
    record = Record()
    record.queue.add("a", samples(10))
    assert record.queue.cancel(["a"]) == ["a"]
    assert record.queue.drain(1000, None) == []
    record.queue.add("a", samples(10))
    assert record.queue.drain(1000, None) == ["a"]


def test_drain_names_what_was_finished_since_the_last_one():
    record = Record()
    record.queue.add("a", samples(10))
    record.work()
    record.queue.add("b", samples(10))
    assert record.queue.drain(1000, None) == ["a", "b"] and record.queue.drain(1000, None) == []


def test_an_empty_lease_is_refused():
    with pytest.raises(ValueError, match="'a' holds no samples"):
        Record().queue.add("a", [])
