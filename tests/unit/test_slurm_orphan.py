"""What agents whose controller is gone get from Slurm: the job starts again or ends, once, if nobody else is at it."""

import pytest

from dynarl.errors import SlurmError
from dynarl.slurm.client import Restarts, TransientError
from dynarl.slurm.fake import FakeClient
from dynarl.slurm.orphan import ASK_TIMES, Orphan, settle

OUTAGE = TransientError("Unable to contact slurm controller")


def job(*options, restarts=0, **settings):
    """A Slurm in which job 1 runs on n1 to n4, and has been started again `restarts` times."""
    slurm = FakeClient(**settings)
    slurm.submit(["sbatch", *options], {})
    slurm.set_state("1", "RUNNING")
    slurm.starts_again["1"] = Restarts(slurm.starts_again["1"].allowed, restarts)
    return slurm


def ask(slurm, node="n2", restarts=0, max_requeues=20, cancel_asked=False, runs_on=False, pauses=None):
    return settle(
        slurm,
        Orphan("1", node, restarts, max_requeues, cancel_asked),
        lambda: runs_on,
        ([] if pauses is None else pauses).append,
    )


def actions(slurm):
    return [call[0] for call in slurm.calls if call[0] in ("requeue", "cancel")]


def test_the_first_agent_has_the_job_requeued_and_the_others_find_that_done():
    slurm = job()
    assert ask(slurm, "n2").state == "requeued"
    later = ask(slurm, "n3")
    assert later.state is None and later.text == "job 1 is PENDING already"
    assert actions(slurm) == ["requeue"] and slurm.jobs["1"].state == "PENDING"


def test_a_request_that_comes_between_anothers_question_and_its_request_is_no_error():
    slurm = job()
    really = slurm.requeue

    def overtaken(job_id):
        really(job_id)
        really(job_id)

    slurm.requeue = overtaken
    assert ask(slurm).text == "job 1 is PENDING already"
    assert "cancel" not in actions(slurm)


@pytest.mark.parametrize(
    "options, restarts, max_requeues, why",
    [
        (["--no-requeue"], 0, 20, "it is not to be requeued"),
        ([], 0, 0, "it is not to be requeued"),
        ([], 3, 3, r"it was requeued 3 times \(cluster.max_requeues\)"),
    ],
)
def test_a_job_that_may_not_start_again_is_cancelled(options, restarts, max_requeues, why):
    slurm = job(*options, restarts=restarts)
    outcome = ask(slurm, restarts=restarts, max_requeues=max_requeues)
    assert (outcome.state, slurm.jobs["1"].state, actions(slurm)) == ("failed", "CANCELLED", ["cancel"])
    assert outcome.text == f"cancelled job 1, since {why}".replace("\\", "")


def test_a_job_that_the_user_wants_to_end_is_not_brought_back():
    slurm = job()
    assert ask(slurm, cancel_asked=True).state == "cancelled" and actions(slurm) == ["cancel"]


def test_a_job_that_slurm_does_not_requeue_is_cancelled():
    slurm = job(faults={"requeue": [SlurmError("scontrol: Requested operation is presently disabled")]})
    assert ask(slurm).text == "cancelled job 1, since scontrol: Requested operation is presently disabled"
    assert slurm.jobs["1"].state == "CANCELLED"


@pytest.mark.parametrize("state", ["COMPLETING", "COMPLETED", "CANCELLED", "PENDING", "TIMEOUT", "NODE_FAIL"])
def test_a_job_that_ends_or_has_ended_is_left_alone(state):
    slurm = job()
    slurm.set_state("1", state)
    assert ask(slurm).text == f"job 1 is {state} already" and actions(slurm) == []


def test_a_job_that_slurm_has_forgotten_is_left_alone():
    slurm = job()
    del slurm.jobs["1"]
    assert ask(slurm).text == "job 1 is gone already" and actions(slurm) == []


def test_a_node_that_the_job_has_lost_leaves_it_alone():
    slurm = job()
    assert ask(slurm, node="n9").text == "job 1 goes on without this node" and actions(slurm) == []


def test_a_controller_that_goes_on_without_this_agent_keeps_its_job():
    slurm = job()
    assert ask(slurm, runs_on=True).state is None and actions(slurm) == []


def test_an_agent_of_an_earlier_start_leaves_the_job_alone():
    slurm = job(restarts=1)
    assert ask(slurm, restarts=0).text == "job 1 has been started again" and actions(slurm) == []


def test_while_slurm_is_silent_the_question_is_repeated():
    slurm, pauses = job(faults={"job": [OUTAGE, None], "requeue": [OUTAGE, None]}), []
    assert ask(slurm, pauses=pauses).state == "requeued" and len(pauses) == 2


def test_a_slurm_that_stays_silent_is_an_error():
    slurm, pauses = job(faults={"job": [OUTAGE] * ASK_TIMES}), []
    with pytest.raises(TransientError):
        ask(slurm, pauses=pauses)
    assert actions(slurm) == [] and len(pauses) == ASK_TIMES - 1
