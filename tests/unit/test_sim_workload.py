"""Drawn and recorded requests of the simulator."""

import hashlib
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.errors import ConfigError
from dynarl.sim.workload import NS_PER_S, Lengths, Random, SimRequest, Tools, Turn, Workload, exp, log

MATH = Workload(
    prompts=256,
    group_size=16,
    prompt=Lengths(median=300, sigma=0.4, cap=1024),
    response=Lengths(
        median=2000, sigma=0.8, cap=16384, tail_share=0.05, tail_start=8000, tail_alpha=1.2, correlation=0.4
    ),
)
TOOLS = Tools(
    mean_calls=2.5, most_calls=6, median_s=3.0, sigma=0.5, most_s=20.0, tokens=Lengths(median=200, cap=400),
    later_turn_share=0.6,
)
AGENTIC = Workload(prompts=64, group_size=16, prompt=MATH.prompt, response=MATH.response, tools=TOOLS)


def drawn(law, prompts, group_size=1, step=1, seed=5):
    return responses(Workload(prompts=prompts, group_size=group_size, prompt=law, response=law).draw(step, seed))


def responses(requests):
    return np.array([request.response_tokens for request in requests])


def test_the_same_seed_gives_the_same_requests_on_any_machine():
    digest = hashlib.sha256(repr(AGENTIC.draw(step=3, seed=11)).encode()).hexdigest()
    assert digest[:16] == "1c187698eda2ef35"


def test_seeds_and_steps_differ():
    draws = [responses(MATH.draw(step, seed)).tolist() for step, seed in ((1, 1), (2, 1), (1, 2))]
    assert draws[0] != draws[1] != draws[2] != draws[0]


def test_samples_are_named_by_step_group_and_member():
    requests = MATH.draw(step=5, seed=1)
    assert len(requests) == MATH.samples == 4096
    assert requests[0].sample == "5:0:0" and requests[17].sample == "5:1:1" and requests[17].group == "5:1"
    assert len({request.prompt_tokens for request in requests[16:32]}) == 1


def test_the_body_is_log_normal_and_what_is_longer_ends_at_the_cap():
    law = Lengths(median=2000, sigma=0.8, cap=16384)
    tokens = drawn(law, 8192)
    assert np.median(tokens) == pytest.approx(2000, rel=0.05)
    assert np.log(tokens).std() == pytest.approx(0.8, rel=0.05)
    # P(z > ln(16384 / 2000) / 0.8)
    assert (tokens == 16384).mean() == pytest.approx(0.5 * math.erfc(math.log(8.192) / 0.8 / math.sqrt(2)), abs=0.003)
    assert tokens.max() == 16384


def test_the_tail_is_heavier_than_the_body():
    body = Lengths(median=1000, sigma=0.5, cap=1_000_000)
    tail = Lengths(median=1000, sigma=0.5, cap=1_000_000, tail_share=0.1, tail_start=4000, tail_alpha=1.0)
    draws = [drawn(law, 4096) for law in (body, tail)]
    assert (draws[0] > 8000).mean() < 0.001
    assert (draws[1] > 8000).mean() == pytest.approx(0.1 / 2, rel=0.2)


@pytest.mark.parametrize("rho", [0.0, 0.5, 1.0])
def test_answers_of_a_group_are_as_alike_as_asked_for(rho):
    law = Lengths(median=2000, sigma=0.5, cap=10**9, correlation=rho)
    tokens = drawn(law, 2048, group_size=2).reshape(-1, 2)
    assert np.corrcoef(np.log(tokens).T)[0, 1] == pytest.approx(rho, abs=0.06)


def test_the_median_drifts_with_the_steps():
    law = Lengths(median=1000, cap=10**6, drift=0.1)
    assert [drawn(law, 1, step=step).tolist() for step in (1, 2, 4)] == [[1000], [1100], [1331]]


def test_turns_share_the_length_and_each_but_the_last_waits_for_a_tool():
    requests = AGENTIC.draw(1, 3)
    for request in requests:
        *before, last = request.turns
        assert all(turn.decode_tokens >= 1 for turn in request.turns)
        assert all(0 < turn.tool_ns <= 20 * 10**9 and 1 <= turn.tool_tokens <= 400 for turn in before)
        assert (last.tool_ns, last.tool_tokens) == (0, 0)
        assert request.response_tokens <= 16384
    turns = [len(request.turns) for request in requests]
    assert max(turns) == 7 and np.mean(turns) == pytest.approx(1 + 2.1, abs=0.25)  # 2.5 but for the bound
    mean = [np.mean([one.turns[turn].decode_tokens for one in requests if len(one.turns) == 4]) for turn in range(4)]
    assert mean == sorted(mean, reverse=True)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), min_size=1, max_size=5), st.data())
def test_a_position_is_in_a_turn_exactly_where_there_is_something_to_decode(parts, data):
    turns = tuple(Turn(tokens, 5, added) for tokens, added in parts[:-1]) + (Turn(parts[-1][0]),)
    request = SimRequest("1:0:0", 10, turns)
    decoded = [index for index, turn in enumerate(turns) for _ in range(turn.decode_tokens + turn.tool_tokens)]
    done = data.draw(st.integers(0, request.response_tokens - 1))
    start = sum(turn.decode_tokens + turn.tool_tokens for turn in turns[: decoded[done]])
    if done < start + turns[decoded[done]].decode_tokens:
        assert request.position(done) == (decoded[done], start + turns[decoded[done]].decode_tokens)
    else:
        with pytest.raises(ValueError, match="nothing to decode"):
            request.position(done)


def test_a_complete_answer_has_nothing_to_decode():
    with pytest.raises(ValueError, match="1:0:0 with 7 tokens"):
        SimRequest("1:0:0", 10, (Turn(7),)).position(7)


def test_exp_and_log_are_those_of_the_library_to_the_last_digits():
    x = np.linspace(-30, 30, 20001)
    np.testing.assert_allclose(exp(x), np.exp(x), rtol=1e-14)
    y = np.concatenate([np.exp(x), np.linspace(1e-16, 2, 1001)])
    np.testing.assert_allclose(log(y), np.log(y), rtol=1e-14, atol=3e-15)


def test_normal_numbers_are_normal():
    z = Random(1, 1).normal(200_000)
    assert abs(z.mean()) < 0.01 and z.std() == pytest.approx(1, abs=0.01)
    assert (z > 2).mean() == pytest.approx(0.02275, abs=0.001)
    assert (z**4).mean() == pytest.approx(3, abs=0.1)


def recorded(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Workload(prompts=1, group_size=2, trace=str(path))


def line(step, group, *turns, prompt=30):
    return {"step": step, "group": group, "prompt_tokens": prompt, "turns": turns}


def test_a_trace_is_replayed_and_begins_again_behind_its_last_step(tmp_path):
    early = line(4, 7, [5, 0.5, 2], [6, 0, 0]), line(4, 7, [9, 0, 0])
    workload = recorded(tmp_path, *early, line(6, 0, [1, 0, 0]), line(6, 0, [2, 0, 0]))
    first, second, third = (workload.draw(step, seed=1) for step in (1, 2, 3))
    assert first == [
        SimRequest("1:0:0", 30, (Turn(5, 500_000_000, 2), Turn(6))),
        SimRequest("1:0:1", 30, (Turn(9),)),
    ]
    assert [one.response_tokens for one in second] == [1, 2]
    assert [one.turns for one in third] == [one.turns for one in first]


def test_a_trace_that_does_not_fit_is_refused_with_its_numbers(tmp_path):
    with pytest.raises(ConfigError, match="step 1 has 1 groups, the smallest of 1 answers; 1 of 2 are asked for"):
        recorded(tmp_path, line(1, 0, [5, 0, 0])).draw(1, 1)
    with pytest.raises(ConfigError, match="trace.jsonl:1: every turn must decode"):
        recorded(tmp_path, line(1, 0, [0, 0, 0])).draw(1, 1)
    with pytest.raises(ConfigError, match="trace.jsonl:1"):
        recorded(tmp_path, {"step": 1}).draw(1, 1)


@pytest.mark.parametrize(
    ("law", "text"),
    [
        ({"median": 0, "cap": 5}, "median = 0 must be at least 1"),
        ({"median": 9, "cap": 5, "correlation": 1.5}, "correlation = 1.5 is a share"),
        ({"median": 9, "cap": 5, "tail_alpha": 0}, "tail_alpha = 0 must be above 0"),
        ({"median": 9, "cap": 5, "drift": -1}, "drift = -1 leaves no tokens"),
    ],
)
def test_a_law_that_makes_no_sense_is_refused(law, text):
    with pytest.raises(ValueError, match=text):
        Lengths(**law)


def test_a_workload_needs_laws_or_a_trace():
    with pytest.raises(ValueError, match="or a `trace`"):
        Workload(prompts=1, group_size=1)


@pytest.mark.filterwarnings("error")
def test_laws_beyond_all_measure_end_at_their_caps():
    wide = Lengths(median=10, sigma=1e300, tail_share=0.5, tail_alpha=1e-300, cap=500)
    assert set(wide.draw(Random(1, 1), 8, 8, 1).ravel().tolist()) == {1, 500}
    tools = Tools(mean_calls=1, most_calls=1, median_s=1, sigma=1e300, most_s=7.0)
    assert set(tools.durations_ns(Random(1, 1), 64).tolist()) == {0, 7 * NS_PER_S}
    with pytest.raises(ValueError, match=r"most_s = 1e\+300 must be at most"):
        Tools(mean_calls=1, most_calls=1, median_s=1, most_s=1e300)
