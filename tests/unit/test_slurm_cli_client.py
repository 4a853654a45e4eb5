"""What only the tools can do wrong: outages, strange names, users' own formats."""

import subprocess

import pytest
from fake_tools import FakeTools

from dynarl.errors import SlurmError
from dynarl.slurm.cli_client import RETRY_PAUSES_S, CliClient
from dynarl.slurm.client import Presence, TransientError

TIMED_OUT = ("", "slurm_load_jobs error: Socket timed out on send/recv operation", 1)
NO_CONTACT = ("", "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", 1)


def client(*script):
    tools = FakeTools(None, *script)
    pauses = []
    return CliClient(tools, pauses.append), tools, pauses


def test_a_question_is_repeated_until_slurm_answers():
    asker, tools, pauses = client(TIMED_OUT, TIMED_OUT)
    assert asker.job("7").presence is Presence.ABSENT
    assert len(tools.commands) == 3 and pauses == list(RETRY_PAUSES_S[:2])


@pytest.mark.parametrize(
    "outage",
    [
        TIMED_OUT,
        NO_CONTACT,
        subprocess.TimeoutExpired("squeue", 60),
        ("", "slurm_load_jobs error: Zero Bytes were transmitted or received", 0),
    ],
)
def test_an_outage_is_unknown_and_never_absent(outage):
    """Exit status 0 with nothing but the message has been seen as well."""
    asker, tools, pauses = client(*[outage] * 10)
    info = asker.job("7")
    assert info.presence is Presence.UNKNOWN and info.alive is None and info.detail
    assert pauses == list(RETRY_PAUSES_S)


def test_a_submission_that_may_have_been_accepted_is_not_repeated():
    asker, tools, pauses = client(
        ("", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", 1)
    )
    with pytest.raises(TransientError, match="may or may not have been accepted: look with squeue"):
        asker.submit(["sbatch", "x"], {})
    assert len(tools.commands) == 1


def test_a_submission_that_surely_was_not_accepted_is_repeated():
    asker, tools, _ = client(NO_CONTACT)
    assert asker.submit(["sbatch", "x"], {"A": "b"}) == "1"
    assert len(tools.commands) == 2


def test_a_refusal_is_passed_on_in_slurms_words():
    asker, tools, _ = client(("", "sbatch: error: Batch job submission failed: Invalid account", 1))
    with pytest.raises(SlurmError, match="sbatch: .*Invalid account") as error:
        asker.submit(["sbatch", "x"], {})
    assert not isinstance(error.value, TransientError) and len(tools.commands) == 1


def test_a_missing_tool_is_named():
    asker, _, _ = client(FileNotFoundError())
    with pytest.raises(SlurmError, match="srun is not on the PATH.*login node"):
        asker.version()


@pytest.mark.parametrize(
    "line, name, nodes, state",
    [
        ("7|RUNNING|n[1-2,5]|None|a|b|c", "a|b|c", ("n1", "n2", "n5"), "RUNNING"),
        ("7|PENDING||Priority|x", "x", (), "PENDING"),
        ("CLUSTER: blue\n7|SIGNALING|n1|None|x", "x", ("n1",), "SIGNALING"),
        ("7|RUNNING|n1|None|na\udce9ve", "na\ufffdve", ("n1",), "RUNNING"),
    ],
)
def test_names_may_hold_anything_and_states_may_be_new(line, name, nodes, state):
    asker, _, _ = client((line + "\n", "", 0))
    info = asker.job("7")
    assert (info.name, info.nodes, info.state, info.alive) == (name, nodes, state, True)


def test_the_users_own_formats_and_language_do_not_reach_the_tools(monkeypatch):
    for variable in ("SQUEUE_FORMAT", "SINFO_FORMAT", "SLURM_TIME_FORMAT", "LC_ALL"):
        monkeypatch.setenv(variable, "de_DE")
    asker, tools, _ = client()
    asker.job("7")
    asker.nodes()
    for environment in tools.environments:
        assert not {"SQUEUE_FORMAT", "SINFO_FORMAT", "SLURM_TIME_FORMAT"} & set(environment)
        assert environment["LC_ALL"] == "C"


def test_sbatch_gets_exactly_the_environment_that_it_is_given():
    asker, tools, _ = client()
    asker.submit(["sbatch", "x"], {"A": "b"})
    assert tools.environments == [{"A": "b"}]


def test_signals_go_to_the_batch_shell_alone_when_asked():
    asker, tools, _ = client()
    asker.cancel("7", signal="USR1", batch_only=True)
    assert tools.commands == [["scancel", "--signal=USR1", "--batch", "7"]]
