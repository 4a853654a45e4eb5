"""The mailbox between two processes, and the messages that lie in it."""

import multiprocessing
import os
import random
import shutil
import subprocess
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.transport.carrier import Carrier
from dynarl.transport.mailbox import (
    FULL,
    TAKEN,
    Aborted,
    Mailbox,
    NoStagingMemory,
    Overdue,
    Patience,
    PeerDied,
    Ring,
    is_now,
    mark,
)
from dynarl.transport.messages import Fragment, Lanes, Places, Schedule, cut, num_bytes

ITEM = {"param": 2, "master": 4}


@given(st.lists(st.integers(0, 700), max_size=40), st.integers(700, 3000))
def test_messages_in_a_ring_overlap_only_those_that_were_taken(sizes, capacity):
    ring = Ring(sizes, capacity)
    for k, (at, size) in enumerate(zip(ring.offset, sizes)):
        assert at + size <= capacity
        assert ring.freed[k] <= k and (k == 0 or ring.freed[k] >= ring.freed[k - 1])
        for other in range(ring.freed[k], k):
            start = ring.offset[other]
            assert not (size and sizes[other] and at < start + sizes[other] and start < at + size)


def test_a_ring_that_holds_all_waits_for_nothing():
    assert Ring([64] * 10, 1000).freed == [0] * 10


def test_a_ring_refuses_what_cannot_fit():
    with pytest.raises(ValueError, match="message 1 of 200 bytes does not fit a ring of 128"):
        Ring([10, 200], 128)


boxes = st.one_of(
    st.tuples(st.integers(0, 5), st.integers(1, 30)).map(lambda t: ((t[0], t[0] + t[1]),)),
    st.tuples(st.integers(0, 5), st.integers(1, 12), st.integers(0, 5), st.integers(1, 12)).map(
        lambda t: ((t[0], t[0] + t[1]), (t[2], t[2] + t[3]))
    ),
)
fragments = st.lists(st.tuples(st.sampled_from(["param", "master"]), st.integers(0, 3), boxes), max_size=12)


@given(fragments, st.integers(4, 200))
def test_cut_fragments_are_the_same_elements_in_the_same_order(listed, limit):
    listed = [Fragment(*f) for f in listed]
    parts = list(cut(listed, ITEM, limit))
    assert all(0 < size <= limit and size == num_bytes(f, ITEM) for size, f in parts)
    assert [e for _, part in parts for f in part for e in elements(f)] == [e for f in listed for e in elements(f)]


def elements(fragment):
    ranges = [range(lo, hi) for lo, hi in fragment.box]
    if len(ranges) == 1:
        return [(fragment.kind, fragment.tensor, i) for i in ranges[0]]
    return [(fragment.kind, fragment.tensor, i, j) for i in ranges[0] for j in ranges[1]]


def test_a_forwarded_fragment_waits_for_its_arrival_only():
    piece = Fragment("param", 0, ((0, 4), (0, 4)))
    other = Fragment("param", 1, ((0, 4), (0, 4)))
    schedule = Schedule.of(
        [
            (0, 1, [], [other]),
            (1, 2, [other], [piece]),
            (2, 3, [piece, other], []),
            (3, 1, [Fragment("param", 2, ((0, 1),))], []),
        ],
        ITEM,
        lambda peer: 1000,
    )
    assert [m.after for m in schedule.outgoing] == [1, 2, 0]
    assert Schedule.from_sizes(schedule.sizes()).sizes() == schedule.sizes()


def test_messages_from_the_same_node_take_no_place():
    piece = Fragment("param", 0, ((0, 32), (0, 1)))
    schedule = Schedule.of([(0, 1, [], [piece]), (1, 2, [], [piece])], ITEM, lambda peer: 1000)
    lanes = Lanes.of(schedule, 0, Places(2, 2), 1000)
    assert lanes.in_ring.sizes == [0, 64] and lanes.needs() == (0, 64, 2)


def make(tmp_path, ring=4096, states=64) -> Mailbox:
    return Mailbox.create(tmp_path / "box", ring, ring, states)


def test_only_the_owner_may_read_a_mailbox(tmp_path):
    box = make(tmp_path)
    assert box.path.stat().st_mode & 0o777 == 0o600
    other = Mailbox.open(box.path)
    box.out(100, 4)[:] = b"abcd"
    assert bytes(other.out(100, 4)) == b"abcd" and bytes(other.into(100, 4)) == b"\0\0\0\0"
    mark(box.outgoing, 3, FULL)
    assert is_now(other.outgoing, 3, FULL) and not is_now(other.incoming, 3, FULL)
    box.reset()
    assert not is_now(other.outgoing, 3, FULL)


def test_a_file_that_is_no_mailbox_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"x" * 8192)
    with pytest.raises(ValueError, match="not a mailbox"):
        Mailbox.open(tmp_path / "x")


def test_a_wait_ends_at_its_deadline():
    patience = Patience(0.05, "the test")
    began = time.monotonic()
    with pytest.raises(Overdue, match="the test did not complete within 0.05 s"):
        while True:
            patience.sleep()
    assert time.monotonic() - began < 50


def test_an_abort_ends_the_wait_of_the_other_process_with_its_reason(tmp_path):
    box = make(tmp_path)
    reader = Mailbox.open(box.path)
    threading.Timer(0.05, box.abort, ["node n3 was lost (é)"]).start()
    patience = Patience(120, "x", [reader.check])
    with pytest.raises(Aborted, match=r"node n3 was lost \(é\)"):
        while True:
            patience.sleep()
    box.reset()
    reader.check()


def test_the_death_of_the_worker_ends_the_wait_of_the_agent(tmp_path):
    box = make(tmp_path)
    process = subprocess.Popen(["sleep", "60"])
    box.watch(process.pid)
    box.check()
    threading.Timer(0.05, process.kill).start()
    patience = Patience(120, "x", [box.check])
    with pytest.raises(PeerDied, match="ended in the middle of a transition"):
        while True:
            patience.sleep()
    process.wait()
    box.remove()
    assert not box.path.exists()


def _orphan(path, said):
    box = Mailbox.open(path)
    box.watch_parent()
    said.with_name("watches").touch()
    patience = Patience(120, "x", [box.check])
    try:
        while True:
            patience.sleep()
    except PeerDied:
        said.write_text("noticed")


def _parent_of_orphan(path, said):
    multiprocessing.get_context("fork").Process(target=_orphan, args=(path, said)).start()
    while not said.with_name("watches").exists():
        time.sleep(0.01)
    os._exit(0)


def test_the_death_of_the_agent_ends_the_wait_of_the_worker(tmp_path):
    box = make(tmp_path)
    process = multiprocessing.get_context("fork").Process(target=_parent_of_orphan, args=(box.path, tmp_path / "said"))
    process.start()
    process.join()
    end = time.monotonic() + 120
    while not (tmp_path / "said").exists():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small tmpfs")
def test_no_memory_is_an_error_and_no_bus_error(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("may not mount here")
    try:
        with pytest.raises(NoStagingMemory, match="lower the transition's budget"):
            Mailbox.create(small / "box", 1 << 20, 1 << 20, 64)
        assert not list(small.iterdir())
        Mailbox.create(small / "box", 4096, 4096, 64).remove()
    finally:
        subprocess.run(["umount", "-l", small], check=True)
        shutil.rmtree(small, ignore_errors=True)


class Blocks:
    """Endpoint of one-axis uint16 fragments: tensor t is a row of `store`."""

    def __init__(self, store):
        self.store, self.copied = store, False

    def pack(self, listed, out):
        at = 0
        for _, tensor, ((lo, hi),) in listed:
            out[at : at + 2 * (hi - lo)] = self.store[tensor, lo:hi].view(np.uint8).data
            at += 2 * (hi - lo)

    def unpack(self, listed, data):
        at = 0
        for _, tensor, ((lo, hi),) in listed:
            self.store[tensor, lo:hi] = np.frombuffer(data, np.uint16, hi - lo, at)
            at += 2 * (hi - lo)

    def copy_local(self, local):
        self.copied = True


LENGTH = 1000


def _transfers(rounds: int, sender: bool):
    listed = [[Fragment("param", t, ((0, LENGTH),))] for t in range(rounds)]
    return [(r, 1, f, []) if sender else (r, 0, [], f) for r, f in enumerate(listed)]


def _receive(box_path, rounds, result_path, die_after=None):
    here, there = Mailbox.open(box_path), Mailbox.open(f"{box_path}-sender")
    lanes = Lanes.of(Schedule.of(_transfers(rounds, False), ITEM, lambda peer: 512), 1, Places(1, 2), 4096)
    sender = Lanes.of(Schedule.of(_transfers(rounds, True), ITEM, lambda peer: 512), 0, Places(1, 2), 2048)
    near = {k: (there, k, sender.out_ring.offset[k]) for k in range(len(lanes.schedule.incoming))}
    store = np.zeros((rounds, LENGTH), np.uint16)
    carrier = Carrier(Blocks(store), lanes, here, near)
    if die_after is not None:
        for _ in range(100_000):
            carrier.advance()
            if carrier._unpacked >= die_after:
                os._exit(9)
            time.sleep(1e-4)
    carrier.run(120.0)
    np.save(result_path, store)


def _pair(tmp_path, rounds, **options):
    Mailbox.create(tmp_path / "box", 4096, 4096, 256)
    out = Mailbox.create(tmp_path / "box-sender", 2048, 4096, 256)
    process = multiprocessing.get_context("fork").Process(
        target=_receive, args=(tmp_path / "box", rounds, tmp_path / "got.npy"), kwargs=options
    )
    process.start()
    lanes = Lanes.of(Schedule.of(_transfers(rounds, True), ITEM, lambda peer: 512), 0, Places(1, 2), 2048)
    store = np.random.default_rng(0).integers(0, 65536, (rounds, LENGTH), np.uint16)
    return process, out, Carrier(Blocks(store), lanes, out, {}), store


def test_two_processes_pass_more_than_the_ring_holds(tmp_path):
    process, _, carrier, store = _pair(tmp_path, 20)
    seconds = carrier.run(120.0)
    process.join()
    assert process.exitcode == 0 and carrier.done and seconds["pack_s"] > 0
    assert np.array_equal(np.load(tmp_path / "got.npy"), store)


def test_a_receiver_that_dies_ends_the_sender(tmp_path):
    process, out, carrier, _ = _pair(tmp_path, 20, die_after=5)
    out.watch(process.pid)
    with pytest.raises(PeerDied):
        carrier.run(120.0)
    process.join()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 5))
def test_carriers_never_wait_for_each_other_in_a_circle(seed, ranks):
    """All ranks of one node in one thread, in random order: somebody can always go on until all are done."""
    import tempfile
    from pathlib import Path

    draw = random.Random(seed)
    places = Places(1, ranks)
    transfers = {r: [] for r in range(ranks)}
    for round_ in range(draw.randint(1, 8)):
        free = list(range(ranks))
        draw.shuffle(free)
        while len(free) > 1 and draw.random() < 0.8:
            a, b = free.pop(), free.pop()
            there = [Fragment("param", round_, ((0, draw.randint(1, LENGTH)),))]
            back = [Fragment("param", round_, ((0, draw.randint(1, LENGTH)),))] if draw.random() < 0.5 else []
            transfers[a].append((round_, b, there, back))
            transfers[b].append((round_, a, back, there))
    with tempfile.TemporaryDirectory() as directory:
        schedules = {r: Schedule.of(transfers[r], ITEM, lambda peer: 300) for r in range(ranks)}
        lanes = {r: Lanes.of(schedules[r], r, places, 600) for r in range(ranks)}
        boxes = {r: Mailbox.create(Path(directory) / str(r), 4096, 4096, 256) for r in range(ranks)}
        from dynarl.transport.mpi import neighbours

        near = neighbours(lanes, places)
        carriers = []
        for r in range(ranks):
            mine = {k: (boxes[s], theirs, at) for k, (s, theirs, at) in near[r].items()}
            carriers.append(Carrier(Blocks(np.zeros((8, LENGTH), np.uint16)), lanes[r], boxes[r], mine))
        idle = 0
        while not all(c.done for c in carriers):
            idle = 0 if draw.choice(carriers).advance() else idle + 1
            assert idle < 1000
        assert all(state == TAKEN for r in range(ranks) for state in boxes[r].outgoing[: len(schedules[r].outgoing)])
