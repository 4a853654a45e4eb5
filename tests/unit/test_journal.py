import math
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.hypergraph import journal as journal_module
from dynarl.hypergraph.fold import fold
from dynarl.hypergraph.journal import Journal, JournalTaken, decode, encode, follow, read


def fill(path, count):
    journal = Journal(path)
    written = [journal.append("numbered", n=n, text=f"line\n{n}") for n in range(count)]
    journal.close()
    return written


def payload(records):
    return [r["n"] for r in records if r["type"] == "numbered"]


def test_what_was_appended_is_read_back_in_order(tmp_path):
    written = fill(tmp_path / "j", 5)
    assert [r for r in read(tmp_path / "j") if r["type"] == "numbered"] == written
    assert [r["seq"] for r in read(tmp_path / "j")] == [1, 2, 3, 4, 5, 6]


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(fields=st.lists(st.dictionaries(st.sampled_from("abcd"), values, max_size=3), max_size=4), where=st.integers(0))
def test_any_prefix_of_the_bytes_gives_a_prefix_of_the_records(tmp_path_factory, fields, where):
    directory = tmp_path_factory.mktemp("journal")
    journal = Journal(directory / "whole")
    for each in fields:
        journal.append("x", **each)
    journal.close()
    whole = (directory / "whole").read_bytes()
    records = list(read(directory / "whole"))
    assert len(records) == len(fields) + 1
    cut = where % (len(whole) + 1)
    (directory / "cut").write_bytes(whole[:cut])
    assert list(read(directory / "cut")) == records[: whole[:cut].count(b"\n")]


@settings(max_examples=100, deadline=None)
@given(position=st.integers(0), flip=st.integers(1, 255))
def test_a_damaged_byte_never_gives_another_record(position, flip):
    line = encode({"seq": 1, "t": 1.5, "type": "x", "owner": "1.aa", "n": 12})
    damaged = bytearray(line)
    damaged[position % len(line)] ^= flip
    assert decode(bytes(damaged)) in (None, decode(line))
    if position % len(line) < line.rindex(b',"crc"'):
        assert decode(bytes(damaged)) is None


@pytest.mark.parametrize("lost_bytes", [1, 2, 30])
def test_a_torn_tail_is_isolated_by_the_next_writer(tmp_path, lost_bytes):
    path = tmp_path / "j"
    fill(path, 3)
    path.write_bytes(path.read_bytes()[:-lost_bytes])
    journal = Journal(path)
    journal.append("numbered", n=99)
    reader = read(path)
    kept = [0, 1, 2, 99] if lost_bytes == 1 else [0, 1, 99]  # only the newline was lost: the record is whole
    assert payload(reader) == kept
    assert reader.torn == (lost_bytes > 1)


def test_sequence_numbers_go_on_after_a_restart(tmp_path):
    fill(tmp_path / "j", 3)
    fill(tmp_path / "j", 2)
    assert [r["seq"] for r in read(tmp_path / "j")] == list(range(1, 8))
    owners = [r["owner"].split(".")[0] for r in read(tmp_path / "j")]
    assert owners == ["1"] * 4 + ["2"] * 3


def test_a_replaced_writer_is_stopped(tmp_path):
    old = Journal(tmp_path / "j")
    new = Journal(tmp_path / "j")
    with pytest.raises(JournalTaken, match="has replaced"):
        old.append("numbered", n=1)
    new.append("numbered", n=2)
    assert payload(read(tmp_path / "j")) == [2]


def test_of_two_writers_with_the_same_term_only_the_first_in_the_file_stays(tmp_path, monkeypatch):
    path = tmp_path / "j"
    rival = encode({"seq": 1, "t": 0.0, "type": "numbered", "owner": "1.zzzz", "n": 5})
    # The rival's first record lands after this writer has looked and before it writes.
    monkeypatch.setattr(journal_module.secrets, "token_hex", lambda size: path.write_bytes(rival) and "aaaa")
    with pytest.raises(JournalTaken, match="1.zzzz has replaced this one, 1.aaaa"):
        Journal(path)
    assert payload(read(path)) == [5]


def test_the_first_of_two_writers_with_the_same_term_goes_on(tmp_path):
    first = Journal(tmp_path / "j")
    with open(tmp_path / "j", "ab") as file:
        file.write(encode({"seq": 1, "t": 0.0, "type": "numbered", "owner": "1.zzzz", "n": 666}))
    first.append("numbered", n=1)
    assert payload(read(tmp_path / "j")) == [1]


def test_records_of_a_replaced_writer_are_dropped_by_readers(tmp_path):
    path = tmp_path / "j"
    fill(path, 1)
    ghost = encode({"seq": 9, "t": 0.0, "type": "numbered", "owner": list(read(path))[0]["owner"], "n": 666})
    fill(path, 1)
    with open(path, "ab") as file:
        file.write(ghost)
    reader = read(path)
    assert payload(reader) == [0, 0]
    assert reader.stale == 1


def test_a_half_written_line_of_a_stranger_does_not_swallow_the_next_record(tmp_path):
    journal = Journal(tmp_path / "j")
    with open(tmp_path / "j", "ab") as file:
        file.write(b'{"seq":5,"t":')
    journal.append("numbered", n=7)
    assert payload(read(tmp_path / "j")) == [7]


def test_a_short_write_is_reported_and_harms_nothing_else(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "j")
    real = journal_module.os.write
    monkeypatch.setattr(journal_module.os, "write", lambda fd, data: real(fd, data[:10]))
    with pytest.raises(OSError, match="only 10 of"):
        journal.append("numbered", n=1)
    monkeypatch.undo()
    journal.append("numbered", n=2)
    records = list(read(tmp_path / "j"))
    assert payload(records) == [2]
    assert [r["seq"] for r in records] == [1, 2]


def test_reading_again_gives_only_what_came_since(tmp_path):
    journal = Journal(tmp_path / "j")
    reader = read(tmp_path / "j")
    assert len(list(reader)) == 1
    assert list(reader) == []
    journal.append("numbered", n=4)
    assert payload(reader) == [4]


def test_following_starts_before_the_journal_exists(tmp_path):
    stream = follow(tmp_path / "j", poll_s=0.01)
    fill(tmp_path / "j", 2)
    assert [next(stream)["type"] for _ in range(3)] == ["journal_opened", "numbered", "numbered"]


def test_a_field_may_not_take_a_reserved_name(tmp_path):
    with pytest.raises(ValueError, match="seq"):
        Journal(tmp_path / "j").append("x", seq=3)


def test_a_loss_that_is_not_a_number_is_null(tmp_path):
    journal = Journal(tmp_path / "j")
    journal.append("step_committed", loss=math.nan)
    assert list(read(tmp_path / "j"))[-1]["loss"] is None


def test_the_crc_is_that_of_the_line_without_it():
    line = encode({"seq": 1, "t": 2, "type": "x", "owner": "1.a"})
    body, _, crc = line.rpartition(b',"crc":')
    assert int(crc[:-2]) == zlib.crc32(body + b"}")


def test_the_writer_has_the_graph_of_all_records_also_of_those_before_it(tmp_path):
    first = Journal(tmp_path / "j")
    first.append("agent_up", node="a", rank=0, home="training")
    first.close()
    second = Journal(tmp_path / "j")
    assert second.graph.roles == {"a": "training"}
    for number in range(1, 4):
        second.append("iteration_started", iteration=number, version=number, samples=[f"{number}:0:0"])
        with open(tmp_path / "j", "ab") as file:  # somebody's half a line: the writer looks at the file again
            file.write(b'{"seq":')
        second.append("step_committed", iteration=number, samples=[f"{number}:0:0"])
    graph = fold(read(tmp_path / "j"))
    assert (second.graph.version, second.graph.iterations) == (graph.version, graph.iterations)
    assert second.graph.faults == graph.faults == []
    assert (second.graph.samples.tally().trained, graph.samples.tally().trained) == (1, 3)


def test_a_last_word_counts_as_that_of_the_writer_that_is_gone(tmp_path):
    path = tmp_path / "j"
    fill(path, 2)
    with path.open("ab") as file:
        file.write(b'{"seq":4,"t":1')  # it died in the middle of a record
    journal_module.add_last_word(path, "last", n=7)
    assert payload(read(path)) == [0, 1] and list(read(path))[-1]["n"] == 7
    assert [r["seq"] for r in read(path)] == [1, 2, 3, 4]
    fill(path, 1)
    assert payload(read(path)) == [0, 1, 0]


def test_only_one_gives_the_last_word(tmp_path):
    fill(tmp_path / "j", 1)
    for code in (1, 2):
        journal_module.add_last_word(tmp_path / "j", "ended", code=code)
    assert [r.get("code") for r in read(tmp_path / "j")] == [None, None, 1]


def test_a_last_word_that_comes_after_the_next_writer_does_not_count(tmp_path, monkeypatch):
    path = tmp_path / "j"
    fill(path, 1)
    whole_open = journal_module.os.open

    def late(*arguments):
        monkeypatch.setattr(journal_module.os, "open", whole_open)
        fill(path, 1)
        return whole_open(*arguments)

    monkeypatch.setattr(journal_module.os, "open", late)
    journal_module.add_last_word(path, "last", n=7)
    assert payload(read(path)) == [0, 0] and "last" not in [r["type"] for r in read(path)]
