"""How an answer grows turn by turn, and which of its tokens are the model's."""

import math

import pytest

from dynarl.wire import ToolCall, Trajectory, pack_floats, pack_ids, unpack_floats, unpack_ids

S = "3:17:0"


def sampled(answer: Trajectory, tokens: list[int], finish: str = "stop") -> Trajectory:
    """As an engine gives it back: all tokens so far, each new one with log-probability -token."""
    return answer.sampled(
        answer.response + pack_ids(tokens), answer.rollout_logprobs + pack_floats([-t for t in tokens]), finish, 4
    )


def output(number: int, tokens: list[int]) -> ToolCall:
    return ToolCall(S, number, b"", pack_ids(tokens), b"memory%d" % number, 0.5)


def test_tokens_of_tools_are_masked_and_have_no_log_probability():
    start = Trajectory(S, pack_ids([1, 2]), b"", b"")
    first = sampled(start, [7, 8])
    assert (first.mask, first.turns, first.last_turn()) == (b"", 1, pack_ids([7, 8]))
    second = sampled(first.answered(output(0, [20, 21, 22]), 99), [9])
    third = sampled(second.answered(output(1, [23]), 99), [5, 6])
    assert unpack_ids(third.response) == [7, 8, 20, 21, 22, 9, 23, 5, 6]
    assert third.mask == bytes([1, 1, 0, 0, 0, 1, 0, 1, 1])
    assert unpack_floats(third.rollout_logprobs) == [-7, -8, 0, 0, 0, -9, 0, -5, -6]
    assert (third.turns, third.tool_calls, third.tool_seconds, third.session) == (3, 2, 1.0, b"memory1")
    assert third.last_turn() == pack_ids([5, 6]) and third.num_masked_tokens == 4
    assert first.num_response_tokens == 2, "former states stay as they were"


def test_a_part_keeps_its_mask():
    answer = sampled(Trajectory(S, b"1234", b"", b""), [7]).answered(output(0, [20]), 99)
    part = sampled(answer, [5], finish="abort")
    assert (part.mask, part.finish, part.tool_calls) == (b"\1\0\1", "abort", 1)
    assert sampled(part, [6]).mask == b"\1\0\1\1"


def test_the_engine_is_compared_with_the_trainer_on_what_it_sampled():
    work = pytest.importorskip("dynarl.agent.work", exc_type=ImportError)
    logprobs = [math.log(0.5), 0.0, math.log(0.25)]
    answer = Trajectory(S, b"1234", pack_ids([7, 20, 8]), pack_floats(logprobs), mask=b"\1\0\1")
    answer.old_logprobs = pack_floats([math.log(0.5), math.log(0.001), math.log(0.35)])
    found = work.compare([answer])
    assert found == pytest.approx({"rollout_probs_diff": 0.1, "rollout_probs_diff_max": 0.1, "tokens": 2.0}, abs=1e-6)


def test_an_output_is_cut_where_the_answer_has_to_end():
    answer = sampled(Trajectory(S, b"1234", b"", b""), [7, 8])
    cut = answer.answered(output(0, [20, 21, 22]), 4)
    assert (unpack_ids(cut.response), cut.mask) == ([7, 8, 20, 21], b"\1\1\0\0")
    assert answer.answered(output(0, [20]), 2).response == answer.response
