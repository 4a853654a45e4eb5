"""State that is read where it lies in the memory of another process of the node."""

import errno
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.transport import carrier as carriers
from dynarl.transport.carrier import Carrier
from dynarl.transport.mailbox import FULL, OFFERED, Mailbox, PeerDied
from dynarl.transport.memory import MOST_PIECES, View, pieces, read, spans_of
from dynarl.transport.messages import Fragment, Lanes, Places, Schedule
from dynarl.transport.offers import Offered, Offers
from dynarl.vps.steps import Local

ITEM = {"param": 2, "master": 4}
ROWS, COLUMNS = 64, 1000


def view(box, array: np.ndarray) -> View:
    return View(box, array.ctypes.data, array.strides, array.itemsize)


@settings(deadline=None)
@given(st.data())
def test_the_pieces_of_a_box_are_its_bytes_in_order(data):
    array = np.arange(30 * 40, dtype=np.uint32).reshape(30, 40)
    (a, b), (c, d) = (
        sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in array.shape
    )
    part, box = array[a:b, c:d], ((a, b), (c, d))
    # In one view, or in views of some rows each.
    cut = data.draw(st.integers(a, b))
    views = [view(((lo, hi), (c, d)), array[lo:hi, c:d]) for lo, hi in ((cut, b), (a, cut)) if lo < hi]
    out = np.zeros(part.shape, np.uint32)
    read(os.getpid(), pieces(spans_of(box, views)), pieces(spans_of(box, [view(box, out)])))
    assert np.array_equal(out, part)


def test_views_side_by_side_do_not_lie_row_by_row():
    array = np.zeros((4, 6), np.uint32)
    box = ((0, 4), (0, 6))
    assert spans_of(box, [view(((0, 4), c), array[:, slice(*c)]) for c in ((0, 2), (2, 6))]) is None
    assert spans_of(((0, 6), (0, 4)), [view(((0, 6), (0, 4)), array.T)]) is None


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=3), st.integers(0, 2**32))
def test_pieces_are_cut_in_other_places_on_each_side(row_bytes, seed):
    """Also where one call of the kernel cannot name all of them."""
    draw = np.random.default_rng(seed)
    rows = MOST_PIECES + 300
    source = draw.integers(0, 256, (len(row_bytes), rows, 64), np.uint8)
    spans = [(source[i].ctypes.data, rows, size, 64) for i, size in enumerate(row_bytes)]
    expected = np.concatenate([source[i, :, :size].reshape(-1) for i, size in enumerate(row_bytes)])
    out = np.zeros(len(expected), np.uint8)
    width = int(draw.integers(1, 40))
    at = np.arange(0, len(out), width)
    mine = np.stack([out.ctypes.data + at, np.minimum(width, len(out) - at)], axis=1)
    read(os.getpid(), pieces(spans), mine)
    assert np.array_equal(out, expected)


def test_sizes_that_differ_are_an_error_and_nothing_is_written():
    out = np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="8 bytes of process .* do not fit a place of 4"):
        read(os.getpid(), np.array([[out.ctypes.data, 8]]), np.array([[out.ctypes.data, 4]]))


def test_a_process_that_is_gone_cannot_be_read():
    process = multiprocessing.get_context("fork").Process(target=lambda: None)
    process.start()
    process.join()
    out = np.zeros(8, np.uint8)
    piece = np.array([[out.ctypes.data, 8]])
    with pytest.raises(OSError, match="cannot read the memory of process") as error:
        read(process.pid, piece, piece)
    assert error.value.errno == errno.ESRCH


def test_who_reaches_the_wrong_process_notices_it(tmp_path):
    box = Mailbox.create(tmp_path / "box", 4096, 4096, 4)
    with pytest.raises(PermissionError, match="offers nothing"):
        Offered(box)
    there, here = np.arange(10, dtype=np.uint8), np.zeros(10, np.uint8)
    offers = Offers(box, {2: [(there.ctypes.data, 1, 10, 10)]})
    mine = pieces([(here.ctypes.data, 1, 10, 10)])
    Offered(Mailbox.open(box.path)).read(2, mine)
    assert np.array_equal(here, there)
    pid, address, num_bytes, _ = box.offered()
    box.offer(pid, address, num_bytes, bytes(16))
    with pytest.raises(PermissionError, match="is not the one that wrote box"):
        Offered(box)
    del offers


class Rows:
    """Endpoint of matrices of uint32, one per tensor. in_place: they may be read where they lie."""

    def __init__(self, store, in_place=True):
        self.store, self.in_place, self.order, self.packed = store, in_place, [], 0

    def _part(self, fragment):
        _, tensor, ((a, b), (c, d)) = fragment
        return self.store[tensor][a:b, c:d]

    def spans(self, fragments, arriving):
        if not self.in_place:
            return None
        self.order += [("spans", f.tensor) for f in fragments if arriving]
        return [span for f in fragments for span in spans_of(f.box, [view(f.box, self._part(f))])]

    def pack(self, fragments, out):
        self.packed += 1
        out[:] = b"".join(self._part(f).tobytes() for f in fragments)

    def unpack(self, fragments, data):
        at = 0
        for f in fragments:
            part = self._part(f)
            part[...] = np.frombuffer(data, np.uint32, part.size, at).reshape(part.shape)
            at += part.nbytes

    def copy_local(self, local):
        self.order += [(item.how, item.fragment.tensor) for item in local]


def transfers(sender: bool, count=6):
    listed = [[Fragment("master", t, ((0, ROWS), (100, COLUMNS)))] for t in range(count)]
    return [(r, 1, f, []) if sender else (r, 0, [], f) for r, f in enumerate(listed)]


def lanes_of(listed, rank, local=()):
    return Lanes.of(Schedule.of(listed, ITEM, lambda peer: 1 << 17, local), rank, Places(1, 3), 1 << 18)


def _receive(path, in_place, result, die_after):
    here, there = Mailbox.open(path), Mailbox.open(f"{path}-sender")
    lanes, sender = lanes_of(transfers(False), 1), lanes_of(transfers(True), 0)
    near = {k: (there, k, sender.out_ring.offset[k]) for k in range(len(lanes.schedule.incoming))}
    store = np.zeros((6, ROWS, COLUMNS), np.uint32)
    carrier = Carrier(Rows(store, in_place), lanes, here, near)
    while die_after is not None:
        carrier.advance()
        if carrier._unpacked >= die_after:
            os.kill(os.getpid(), signal.SIGKILL)
    carrier.run(120.0)
    np.save(result, store)


def pair(tmp_path, in_place=True, die_after=None, sender_in_place=True):
    out_bytes = lanes_of(transfers(True), 0).needs()[0]
    Mailbox.create(tmp_path / "box", 4096, 4096, 64)
    out = Mailbox.create(tmp_path / "box-sender", out_bytes, 4096, 64)
    process = multiprocessing.get_context("fork").Process(
        target=_receive, args=(tmp_path / "box", in_place, tmp_path / "got.npy", die_after)
    )
    process.start()
    store = np.random.default_rng(0).integers(0, 1 << 32, (6, ROWS, COLUMNS), np.uint32)
    return process, out, Carrier(Rows(store, sender_in_place), lanes_of(transfers(True), 0), out, {}), store


def arrived(tmp_path, store) -> bool:
    got = np.load(tmp_path / "got.npy")
    return np.array_equal(got[:, :, 100:], store[:, :, 100:]) and not got[:, :, :100].any()


def test_a_neighbour_reads_without_anything_being_packed(tmp_path):
    process, _, carrier, store = pair(tmp_path)
    seconds = carrier.run(120.0)
    process.join()
    assert process.exitcode == 0 and arrived(tmp_path, store)
    assert carrier._endpoint.packed == 0 and seconds["pack_s"] == 0


@pytest.mark.parametrize("sender, receiver", [(True, False), (False, True)])
def test_what_cannot_be_read_in_place_on_both_sides_is_packed(sender, receiver, tmp_path):
    process, _, carrier, store = pair(tmp_path, in_place=receiver, sender_in_place=sender)
    carrier.run(120.0)
    process.join()
    assert process.exitcode == 0 and arrived(tmp_path, store)
    assert carrier._endpoint.packed == len(carrier._out)


def test_a_receiver_that_may_not_read_gets_it_packed(tmp_path, monkeypatch):
    def forbidden(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("dynarl.transport.offers.read", forbidden)  # the receiver is forked
    process, _, carrier, store = pair(tmp_path)
    carrier.run(120.0)
    process.join()
    assert process.exitcode == 0 and arrived(tmp_path, store)


def test_the_sender_is_done_when_nobody_reads_its_memory_any_more(tmp_path):
    boxes = [Mailbox.create(tmp_path / str(i), lanes_of(transfers(True), 0).needs()[0], 4096, 64) for i in range(2)]
    sender = lanes_of(transfers(True), 0)
    out = Carrier(Rows(np.ones((6, ROWS, COLUMNS), np.uint32)), sender, boxes[0], {})
    while out.advance():
        pass
    assert not out.done and set(boxes[0].outgoing[: len(sender.schedule.outgoing)]) == {OFFERED}
    lanes = lanes_of(transfers(False), 1)
    near = {k: (boxes[0], k, sender.out_ring.offset[k]) for k in range(len(lanes.schedule.incoming))}
    into = Carrier(Rows(np.zeros((6, ROWS, COLUMNS), np.uint32)), lanes, boxes[1], near)
    while not into.done:
        assert not out.done
        into.advance()
    out.advance()
    assert out.done


def test_a_sender_that_dies_is_noticed_by_who_reads_its_memory(tmp_path):
    boxes = [Mailbox.create(tmp_path / str(i), lanes_of(transfers(True), 0).needs()[0], 4096, 64) for i in range(2)]

    def offer():
        carrier = Carrier(Rows(np.ones((6, ROWS, COLUMNS), np.uint32)), lanes_of(transfers(True), 0), boxes[0], {})
        while True:
            carrier.advance()
            time.sleep(1e-3)

    process = multiprocessing.get_context("fork").Process(target=offer, daemon=True)
    process.start()
    lanes, sender = lanes_of(transfers(False), 1), lanes_of(transfers(True), 0)
    near = {k: (boxes[0], k, sender.out_ring.offset[k]) for k in range(len(lanes.schedule.incoming))}
    carrier = Carrier(Rows(np.zeros((6, ROWS, COLUMNS), np.uint32)), lanes, boxes[1], near)
    while carrier._unpacked < 2:
        carrier.advance()
    process.kill()
    process.join()
    with pytest.raises(PeerDied, match="cannot read the memory of process"):
        carrier.run(120.0)


def test_a_receiver_that_dies_leaves_the_sender_waiting_for_its_agent(tmp_path):
    process, out, carrier, _ = pair(tmp_path, die_after=2)
    out.watch(process.pid)
    with pytest.raises(PeerDied):
        carrier.run(120.0)
    process.join()


def test_small_messages_are_packed(tmp_path):
    small = [(0, 1, [Fragment("master", 0, ((0, 2), (0, 10)))], [])]
    assert 2 * 10 * 4 < carriers.IN_PLACE_BYTES
    box = Mailbox.create(tmp_path / "box", 4096, 4096, 4)
    carrier = Carrier(Rows(np.ones((1, ROWS, COLUMNS), np.uint32)), lanes_of(small, 0), box, {})
    carrier.advance()
    assert box.outgoing[0] == FULL


rectangles = st.tuples(*[st.integers(0, 8), st.integers(1, 8)] * 2).map(
    lambda t: ((t[0], t[0] + t[1]), (t[2], t[2] + t[3]))
)


@settings(deadline=None)
@given(rectangles, st.integers(0, 16), st.integers(0, 16), st.integers(16, 400))
def test_every_element_is_cast_once_and_after_its_master_is_there(cast, kept_rows, split, limit):
    """Masters 16 x 16: some rows are kept, of the others some columns come in one round and the rest in another."""

    def boxes():
        for how, box in (
            ("keep", ((0, kept_rows), (0, 16))),
            (0, ((kept_rows, 16), (0, split))),
            (1, ((kept_rows, 16), (split, 16))),
        ):
            if all(lo < hi for lo, hi in box):
                yield how, Fragment("master", 3, box)

    listed = list(boxes())
    local = [Local("derive", 0, Fragment("param", 3, cast))]
    local += [Local("keep", 0, f) for how, f in listed if how == "keep"]
    arriving = [(how, 1, [], [f]) for how, f in listed if how != "keep"]
    schedule = Schedule.of(arriving, ITEM, lambda peer: limit, local, local_limit=limit)
    masters, casts = np.zeros((16, 16), int), np.zeros((16, 16), int)

    def at(fragment):
        return tuple(slice(lo, hi) for lo, hi in fragment.box)

    def do(item):
        where = at(item.fragment)
        if item.how == "keep":
            masters[where] += 1
        else:
            assert item.fragment.kind == "param" and masters[where].all()
            casts[where] += 1

    for message in schedule.incoming:
        for fragment in message.fragments:
            masters[at(fragment)] += 1
        for item in message.then:
            do(item)
    for item in schedule.local:
        do(item)
    wanted = np.zeros((16, 16), int)
    wanted[tuple(slice(lo, hi) for lo, hi in cast)] = 1
    assert (masters == 1).all() and np.array_equal(casts, wanted)
