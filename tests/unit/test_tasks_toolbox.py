"""The task tools: what its questions need, which are held out, what its demonstrations show."""

import pytest

from dynarl.tasks import tokenizer
from dynarl.tasks.base import is_held_out, open_task
from dynarl.tasks.toolbox import KINDS, MARKER, Toolbox, corpus, facts
from dynarl.tasks.tools.base import run

WITHOUT_PYTHON = {"kinds": "multiply lookup chain", "tools": "calculator search"}


def answered(task: Toolbox, index: int) -> str:
    """A demonstration with what the tools really answer."""
    _, turns = task.demonstration(index)
    text, memory = "", {}
    for turn in turns[:-1]:
        text += turn + task.output_begin + run(task.tools(), *task.parse_call(turn), memory) + task.output_end
    return text + turns[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tools_lead_to_the_answer(kind):
    """The last tool says the very number that the task, which computes it by itself, takes for right."""
    task = open_task("tools", {"kinds": kind, "called": 1.0, "unconfined_python": True}, 1)
    for index in range(4 if kind == "digits" else 40):
        text = answered(task, index)
        _, _, answer = text.rpartition(MARKER)
        assert answer in text.rpartition(task.output_begin)[2].partition(task.output_end)[0].split()
        assert len(task.demonstration(index)[1]) == {"chain": 3}.get(kind, 2)


def test_a_long_chain_is_computed_from_left_to_right_one_call_at_a_time():
    """The product first: what follows it is in the order of arithmetic, so Python must agree on the whole."""
    task, counts = Toolbox({"kinds": "chain", "calculations": 12, "called": 1.0}, 1), []
    values = {fact.phrase: fact.number for fact in facts()}
    for index in range(80):
        text = answered(task, index)
        question, turns = task.demonstration(index)
        phrase, _, rest = question.removesuffix(" =").partition(" * ")
        assert text.rpartition(MARKER)[2] == str(eval(f"{values[phrase]} * {rest}"))
        counts.append(len(turns) - 2)
        tokenizer.build(task.symbols()).encode(question + text)
    assert (min(counts), max(counts)) == (1, 12) and sorted(counts)[len(counts) // 2] < 6


def test_only_the_number_after_the_last_marker_counts_and_only_if_the_model_wrote_it():
    task = Toolbox({"kinds": "multiply"}, 3)
    a, b = task.question("eval", 0).removesuffix(" =").split(" * ")
    right = int(a) * int(b)
    verdicts = {
        f"{MARKER}{right}": 1.0,
        f"<call>calculator {a}*{b}</call><result>{right}</result>{MARKER}{right}": 1.0,
        f"{MARKER}1{MARKER}{right}": 1.0,
        f"{MARKER}{right}{MARKER}1": 0.0,
        f"{right}": 0.0,
        "": 0.0,
        MARKER: 0.0,
        f"{MARKER}{right}<call>python print()</call><result></result>": 0.0,
        f"<call>python x</call><result>{MARKER}{right}</result>": 0.0,
    }
    for text, reward in verdicts.items():
        assert task.verify("eval", 0, text).reward == reward, text


def test_what_is_held_out_is_never_trained_on_or_demonstrated():
    tasks = [Toolbox(WITHOUT_PYTHON, seed) for seed in (1, 2)]
    held_out = {task.question("eval", i) for task in tasks for i in range(600)}
    seen = {task.question("train", i) for task in tasks for i in range(600)} | {
        task.demonstration(i)[0] for task in tasks for i in range(600)
    }
    assert held_out.isdisjoint(seen)
    names = {fact.name for fact in facts() if is_held_out(fact.name)}
    assert 10 < len(names) < 30 and not any(name in question for name in names for question in seen)
    halves = {half for fact in facts() if not is_held_out(fact.name) for half in (fact.name[:3], fact.name[3:])}
    assert all(name[:3] in halves and name[3:] in halves for name in names), "their parts are known, the names are not"


def test_questions_depend_on_seed_split_and_index_alone():
    first, second = Toolbox({}, 1), Toolbox({}, 1)
    assert [first.question("train", i) for i in range(50)] == [
        second.question("train", i) for i in reversed(range(50))
    ][::-1]
    assert [first.question("train", i) for i in range(50)] != [Toolbox({}, 2).question("train", i) for i in range(50)]


def test_calls_are_demonstrated_as_often_as_asked_for():
    task = Toolbox(WITHOUT_PYTHON | {"called": 0.3, "called_first": 100}, 1)
    called = [len(task.demonstration(index)[1]) > 1 for index in range(1100)]
    assert all(called[:100]) and 0.25 < sum(called[100:]) / 1000 < 0.35


def test_every_text_of_the_task_has_its_tokens():
    task = Toolbox({"called": 1.0, "unconfined_python": True}, 1)
    codec = tokenizer.build(task.symbols())
    texts = [
        *corpus(),
        *(task.question("train", i) for i in range(200)),
        *("".join(task.demonstration(i)[1]) for i in range(200)),
    ]
    for text in texts:
        assert codec.decode(codec.encode(text)) == text
    assert codec.decode([codec.token(mark) for mark in (task.call_begin, task.call_end)]) == "<call></call>"
    with pytest.raises(ValueError, match="not one token"):
        codec.token("12")


@pytest.mark.parametrize(
    "args, text",
    [
        ({"kinds": "divide"}, "unknown divide; known are multiply"),
        ({"kinds": ""}, "empty"),
        ({"tools": "hammer"}, "unknown hammer"),
        ({"digit": 3}, "digit"),
        ({"digits": 0}, "digits"),
    ],
)
def test_wrong_arguments_are_named(args, text):
    with pytest.raises(ValueError, match=text):
        open_task("tools", args, 1)
