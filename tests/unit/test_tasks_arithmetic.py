"""The arithmetic task: its questions, its splits, its verdicts, its demonstrations."""

import json
import subprocess
import sys

import pytest

from dynarl.tasks.arithmetic import INSTRUCTION, MARKER, Arithmetic, is_held_out, worked_steps
from dynarl.tasks.base import open_task

SHORT = {"min_terms": 2, "max_terms": 4}  # few distinct questions: collisions between splits would show


def answer_of(question: str) -> int:
    return eval(question.removeprefix(INSTRUCTION).removesuffix(" ="))  # noqa: S307 - digits and signs only


def test_a_question_depends_only_on_seed_split_and_index():
    first, second = Arithmetic({}, seed=1), Arithmetic({}, seed=1)
    backwards = [second.question("train", index) for index in reversed(range(50))]
    assert [first.question("train", index) for index in range(50)] == backwards[::-1]
    assert [first.question("train", index) for index in range(50)] != [Arithmetic({}, 2).question("train", i) for i in range(50)]


def test_questions_are_the_same_in_another_process():
    program = (
        "import json; from dynarl.tasks.arithmetic import Arithmetic; a = Arithmetic({}, 7);"
        "print(json.dumps([a.question(s, i) for s in ('train', 'eval') for i in range(20)]))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    here = Arithmetic({}, 7)
    assert json.loads(ran.stdout) == [here.question(s, i) for s in ("train", "eval") for i in range(20)]


def test_no_question_is_in_both_splits_whatever_the_seeds():
    tasks = [Arithmetic(SHORT, seed) for seed in (1, 2)]
    eval_questions = {task.question("eval", i) for task in tasks for i in range(1500)}
    trained = {task.question("train", i) for task in tasks for i in range(1500)}
    demonstrated = {task.demonstration(i)[0] for task in tasks for i in range(1500)}
    assert eval_questions.isdisjoint(trained | demonstrated)
    assert len(eval_questions) > 100 and len(trained) > 500


def test_about_one_question_in_eight_is_held_out():
    questions = {f"{a} + {b} =" for a in range(100) for b in range(100)}
    held_out = sum(map(is_held_out, questions)) / len(questions)
    assert 0.11 < held_out < 0.14


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("{marker}{answer}", 1.0),
        ("\n1 + 1 = 2{marker}{answer}", 1.0),
        ("{marker}{wrong}{marker}{answer}", 1.0),
        ("{marker}{answer}{marker}{wrong}", 0.0),
        ("{marker}{wrong}", 0.0),
        ("{answer}", 0.0),
        ("", 0.0),
        ("{marker}", 0.0),
        ("{marker}{answer} + 0", 0.0),
        ("{marker}{answer}\n", 1.0),
        ("{marker}<unk>{answer}", 0.0),
    ],
)
def test_the_last_marked_number_of_the_response_decides(response, reward):
    task = Arithmetic({}, seed=3)
    for index in range(20):
        answer = answer_of(task.question("eval", index))
        text = response.format(marker=MARKER, answer=answer, wrong=answer + 1)
        score = task.verify("eval", index, text)
        assert (score.reward, score.correct) == (reward, reward == 1.0), text


def test_the_verdict_is_that_of_the_package():
    """An oracle that the package alone knows: leading zeros and a sign are tolerated, part marks are not given."""
    task = Arithmetic({}, seed=3)
    index = next(i for i in range(100) if answer_of(task.question("train", i)) > 0)
    answer = answer_of(task.question("train", index))
    assert task.verify("train", index, f"{MARKER}0{answer}").reward == 1.0
    assert task.verify("train", index, f"{MARKER}{answer}0{answer}").reward == 0.0


def test_every_demonstration_is_right_and_its_steps_are_too():
    task = Arithmetic({"worked": 0.5}, seed=5)
    for index in range(300):
        question, response = task.demonstration(index)
        steps, marker, answer = response.rpartition(MARKER)
        assert marker and int(answer) == answer_of(question)
        for line in steps.split("\n")[1:]:
            left, right = line.split(" = ")
            assert eval(left) == int(right)  # noqa: S307
        if steps:
            assert steps.endswith(f" = {answer}")


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_share_of_worked_demonstrations_is_as_asked(share):
    task = Arithmetic({"worked": share}, seed=1)
    worked = sum(not task.demonstration(index)[1].startswith(MARKER) for index in range(1000)) / 1000
    assert abs(worked - share) < 0.05


def test_the_first_demonstrations_can_all_be_worked():
    task = Arithmetic({"worked": 0.0, "worked_first": 30}, seed=1)
    worked = [not task.demonstration(index)[1].startswith(MARKER) for index in range(60)]
    assert worked == [True] * 30 + [False] * 30


def test_demonstrated_chains_can_start_short_and_grow():
    task = Arithmetic({"min_terms": 2, "max_terms": 10, "tail": 0.0, "growing": 400}, seed=1)
    terms = [len(task.demonstration(index)[0].removeprefix(INSTRUCTION).split()) // 2 for index in range(600)]
    assert set(terms[:50]) == {2}
    assert max(terms[:200]) <= 6 and max(terms[200:400]) in (8, 9) and max(terms[400:]) == 10
    grown = Arithmetic({"min_terms": 2, "max_terms": 10, "tail": 0.0}, seed=1)
    assert [task.question("train", i) for i in range(50)] == [grown.question("train", i) for i in range(50)]


def test_held_out_questions_are_all_different_in_whatever_order_they_are_asked_for():
    task = Arithmetic({"max_terms": 20, "tail": 1.3}, seed=1)
    last = task.question("eval", 255)
    questions = [task.question("eval", index) for index in range(256)]
    assert len(set(questions)) == 256 and questions[255] == last


def test_too_few_held_out_questions_are_an_error_that_says_how_many_there_are():
    task = Arithmetic({"min_terms": 2, "max_terms": 2}, seed=1)
    with pytest.raises(ValueError, match=r"task: \d+ different held-out questions were found"):
        task.question("eval", 1000)


def test_worked_lengths_have_a_long_tail():
    task = Arithmetic({"worked": 1.0}, seed=1)
    lengths = sorted(len(task.demonstration(index)[1]) for index in range(1000))
    assert lengths[-1] > 3 * lengths[500]


def test_worked_steps_follow_the_running_total():
    assert worked_steps("5 + 3 - 9") == "\n5 + 3 = 8\n8 - 9 = -1"


@pytest.mark.parametrize(
    ("args", "part"),
    [({"max_term": 3}, "max_term"), ({"min_terms": 5, "max_terms": 3}, "min_terms 5"), ({"worked": 2.0}, "worked"), ({"tail": "x"}, "tail")],
)
def test_bad_arguments_are_named(args, part):
    with pytest.raises(ValueError, match=part):
        open_task("arithmetic", args, 1)


def test_bad_split_and_index_are_refused():
    task = Arithmetic({}, 1)
    with pytest.raises(ValueError, match="'test'"):
        task.question("test", 0)
    with pytest.raises(ValueError, match="-1"):
        task.verify("train", -1, "")


def test_unknown_tasks_are_refused():
    with pytest.raises(ValueError, match="known are arithmetic"):
        open_task("algebra", {}, 1)
    with pytest.raises(ValueError, match="no class Nothing"):
        open_task("dynarl.tasks.arithmetic:Nothing", {}, 1)
    with pytest.raises(ValueError, match="no class INSTRUCTION"):
        open_task("dynarl.tasks.arithmetic:INSTRUCTION", {}, 1)
