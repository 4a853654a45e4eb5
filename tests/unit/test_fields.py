"""Records with fields of wrong types cost themselves and nothing else."""

import json
import random

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic_run import SyntheticRun

from dynarl import rundir
from dynarl.cli.status import command
from dynarl.hypergraph.fold import apply
from dynarl.hypergraph.graph import Graph
from dynarl.hypergraph.journal import decode, encode
from dynarl.report import run as run_module
from dynarl.slurm.client import JobInfo, Presence

JUNK = [None, True, -1, 3, 0.5, "x", "", [], [1], ["a", None], {}, {"a": 1}, {"n1": None}, [[]], {"": {"": []}}]


@pytest.fixture
def whole(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNARL_RUNS", str(tmp_path))
    monkeypatch.setattr(run_module, "ask_slurm", lambda job_id: JobInfo(job_id, Presence.UNKNOWN))
    synthetic = SyntheticRun(tmp_path)
    synthetic.whole()
    return rundir.journal(synthetic.run)


def places(value, path=()):
    """All places in a record at which something else could stand."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from places(each, (*path, key))


def changed(record, source):
    """The record with something else in one place, under a valid checksum."""
    record = json.loads(json.dumps(record))
    *path, last = source.choice([path for path in places(record) if path != ("crc",)])
    spot = record
    for key in path:
        spot = spot[key]
    spot[last] = source.choice(JUNK)
    return record


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.integers(0, 10**9))
def test_status_shows_a_run_whatever_stands_in_its_journal(whole, seed):
    source, lines = random.Random(seed), whole.read_bytes().splitlines(keepends=True)
    records = [decode(line) for line in lines]
    for index in source.sample(range(len(records)), 3):
        records[index] = changed(records[index], source)
    whole.write_bytes(b"".join(encode(record) for record in records))
    try:
        for more in ([], ["-o", "json"]):
            found = CliRunner().invoke(command, ["last", *more])
            assert found.exit_code == 0, found.output
    finally:
        whole.write_bytes(b"".join(lines))


def test_what_was_wrong_is_told_by_its_place_and_nothing_of_the_record_counts():
    graph = Graph()
    moves = [{"node": "n1", "source": "rollout", "target": 7}]
    apply(graph, {"seq": 4, "t": 1.0, "type": "epoch_proposed", "owner": "1.a", "epoch": 1, "moves": moves})
    assert graph.epochs == [] and graph.faults == [
        "record 4: epoch_proposed was left out: Expected `str`, got `int` - at `$.moves[0].target`"
    ]


def test_a_line_whose_reserved_fields_are_no_such_thing_is_damaged():
    good = {"seq": 1, "t": 2.0, "type": "x", "owner": "1.a"}
    assert decode(encode(good)) == good
    for name, wrong in (("seq", "1"), ("t", None), ("type", 3), ("owner", "a.1"), ("owner", 1)):
        assert decode(encode(good | {name: wrong})) is None
