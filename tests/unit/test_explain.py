import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from graph_records import change, decision, job, records
from synthetic_run import SyntheticRun

from dynarl.cli.explain import command
from dynarl.report.explain import entries

GOLDEN = Path(__file__).parents[1] / "golden"
SEEN = {
    "nodes__rollout": 2, "nodes__free": 0, "requests__running": 7, "requests__waiting": 0,
    "groups__inference__waiting": 2, "groups__inference__in_work": 1, "error": 0.0312,
}
AFTER = {"a": "training", "b": "training"}
MOVE = change(3, AFTER, a=("rollout", "training"))
BEGIN = ("iteration_started", {"iteration": 1, "version": 1, "samples": []})


def told(*events):
    return entries(records(*job(), BEGIN, *events))


@pytest.fixture
def synthetic(tmp_path, monkeypatch):
    monkeypatch.setenv("DYNARL_RUNS", str(tmp_path))
    run = SyntheticRun(tmp_path)
    run.start()
    return run


@pytest.fixture
def story(synthetic):
    """A change by threshold, a decision to stay, one that moved, a death, and a way back."""
    synthetic.iteration(1)
    synthetic.record("iteration_started", iteration=2, version=2, samples=["2:0:0"])
    synthetic.wait(4.25)
    for made in (decision(1, 2, reason="Nothing would end earlier.", **SEEN),
                 decision(2, 2, {"n1": "training"}, "One node less generates in time.", **SEEN)):
        synthetic.record(made[0], **made[1])
    synthetic.move("training", ["n1"])
    synthetic.record("worker_died", node="n2", role="rollout", device=0, attempt=1, status="killed by SIGKILL", tail=[])
    synthetic.wait(1.4)
    synthetic.record("worker_up", node="n2", role="rollout", device=0, attempt=2)
    outcome = {"predicted_finish_s": 16.5, "actual_finish_s": 17.0, "predicted_cost_s": 0.4, "actual_cost_s": 0.3}
    synthetic.record("decision_outcome", number=2, **outcome)
    synthetic.record("resumed", iteration=1, checkpoint="/runs/demo/checkpoints/step-000001")
    return synthetic


def test_a_record_that_lacks_a_field_is_left_out():
    whole = [entry.what for entry in told(*MOVE)]
    assert [entry.what for entry in told(("worker_died", {"node": "a"}), ("epoch_committed", {}), *MOVE)] == whole


def invoke(*args):
    return CliRunner().invoke(command, args)


@pytest.mark.parametrize(
    "name, args",
    [("explain", []), ("explain-decision", ["--decision", "2"]), ("explain-change", ["--decision", "e1"])],
)
def test_the_story_reads_like_the_golden_file(story, name, args):
    """To accept a change: DYNARL_UPDATE_GOLDEN=1, then read the diff."""
    found = "\n".join(line.rstrip() for line in invoke("last", *args).stdout.splitlines()) + "\n"
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("DYNARL_UPDATE_GOLDEN"):
        file.write_text(found)
    assert found == file.read_text()


def test_decisions_to_stay_are_listed_only_when_asked_for(story):
    assert "left out: 1" in invoke().stderr
    assert "left out" not in invoke("--all").stderr
    short, full = (json.loads(invoke("-o", "json", *args).stdout)["entries"] for args in ([], ["--all"]))
    assert [e["label"] for e in full if e not in short] == ["1"]
    assert [e["kind"] for e in short] == ["roles", "roles", "decision", "recovery", "recovery"]


def test_a_decision_is_found_by_the_epoch_that_carried_it_out_too(story):
    by_epoch, by_number = (json.loads(invoke("-o", "json", "--decision", n).stdout) for n in ("e3", "2"))
    assert by_epoch == by_number
    entry = by_number["entry"]
    assert (entry["gain_s"], entry["iteration"], entry["record"]["chosen"]) == (3.5, 2, 1)
    assert entry["outcome"]["actual_finish_s"] == 17.0 and entry["epochs"][0]["state"] == "committed"


def test_a_number_that_is_not_there_is_an_error_that_names_those_that_are(story):
    result = invoke("--decision", "9")
    assert result.exit_code == 1
    assert "has no decision 9; it has decisions 1 to 2 and changes e1 to e3" in result.stderr


def test_a_run_in_which_nothing_happened_says_so(synthetic):
    assert "nothing has been decided, and nothing has broken" in invoke().stdout
    assert "it has none yet" in invoke("--decision", "1").stderr


def test_a_decision_of_several_moves_is_joined_with_both_epochs_that_made_them():
    wanted = decision(1, 1, {"a": "training", "b": "inference"})
    second = change(4, {"a": "training", "b": "inference"}, b=("training", "inference"))
    (entry,) = told(wanted, *MOVE, *second)
    assert entry.what == "a to training, b to inference"
    assert [epoch["epoch"] for epoch in entry.epochs] == [3, 4]
    assert entry.result() == "done, paused 10 ms; done, paused 10 ms"


def test_a_change_that_no_decision_wanted_stands_for_itself():
    made, entry = told(decision(1, 1, {"a": "inference"}), *MOVE)
    assert (made.result(), made.epochs) == ("not carried out", [])
    assert (entry.kind, entry.label, entry.result()) == ("roles", "e3", "done, paused 10 ms")
    later = ("iteration_started", {"iteration": 2, "version": 2, "samples": []})
    made, entry = told(decision(1, 1, {"a": "training"}), later, *MOVE)  # the same move, but of another iteration
    assert (made.epochs, entry.label) == ([], "e3")


MOVED = decision(1, 1, {"a": "training"})
LISTED = [{"node": "a", "source": "rollout", "target": "training"}]
RESULTS = {
    "under way": ([MOVED, MOVE[0]], "under way"),
    "cancelled": (
        [MOVED, MOVE[0], ("epoch_cancelled", {"epoch": 3, "reason": "no memory", "rolled_back": False})],
        "cancelled: no memory"),
    "rolled back": (
        [MOVED, MOVE[0], ("epoch_cancelled", {"epoch": 3, "reason": "digests", "rolled_back": True})],
        "rolled back: digests"),
    "refused": (
        [MOVED, ("epoch_refused", {"moves": LISTED, "reason": "", "broken": ["the last one", "no worker"]})],
        "refused: the last one; no worker"),
    "a layout": (
        [("layout_committed", {"iteration": 2, "layout": "tp=2,pp=1", "pause_ms": 31.0})], "done, paused 31 ms"),
    "a layout that was not taken": (
        [("layout_cancelled", {"iteration": 2, "layout": "tp=2,pp=1", "reason": "no memory"})], "cancelled: no memory"),
}


@pytest.mark.parametrize("events, result", RESULTS.values(), ids=RESULTS)
def test_what_came_of_it(events, result):
    (entry,) = told(*events)
    assert entry.result() == result


DEAD = {"node": "a", "role": "rollout", "device": 0}


def test_recoveries_explain_themselves():
    hung = ("worker_rebooted", {**DEAD, "reason": "no token for 30 s"})
    killed, back = ("worker_died", {**DEAD, "status": "killed"}), ("worker_up", {**DEAD, "attempt": 2})
    again = ("run_started", {"run": "r", "attempt": 2, "nodes": ["a"]})
    events = [hung, killed, back, ("resumed", {"iteration": 0, "checkpoint": None}), again,
              ("step_launched", {"nodes": ["a", "b"]}),
              ("step_lost", {"reason": "no sign of life from a for 20 s", "nodes": ["a"]}), ("step_launched", {"nodes": ["b"]}),
              ("checkpoint_failed", {"reason": "disk full"})]
    assert [(e.what, e.reason, e.came) for e in told(*events)] == [
        ("rollout worker 0 on a was ended by its agent", "no token for 30 s", "a new one is up after 2.0s"),
        ("the trainer went back to the beginning", "", "goes on with iteration 1"),
        ("start 2 of the controller", "the one before left without a word", ""),
        ("the step was started again on b", "no sign of life from a for 20 s", ""),
        ("a checkpoint could not be written", "disk full", ""),
    ]
    ended = ("run_ended", {"state": "requeued", "reason": "time limit near", "exit_code": 75})
    assert told(ended, again)[0].reason == "the one before: requeued, time limit near"
    (entry,) = told(killed)
    assert (entry.result(), entry.reason) == ("not back yet", "killed")


def test_records_with_less_in_them_than_usual_are_still_told():
    """As an older or newer version may have written them."""
    found = told(("decision", {"number": 1, "iteration": 1}), ("epoch_committed", {"epoch": 9, "roles": AFTER}),
                 ("decision_outcome", {"number": 7}), ("tool_called", {}))
    assert [(e.what, e.result()) for e in found] == [("stay", "")]
