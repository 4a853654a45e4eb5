"""The simulated rollout engine: when answers end, what it holds, whom it takes in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.perf.rollout import StepModel
from dynarl.sim import decode, waiting
from dynarl.sim.decode import DecodeEngine, EngineError
from dynarl.sim.workload import SimRequest, Turn
from token_engine import TokenEngine, follow

MS = 1_000_000


def one_turn(member, prompt, tokens, group=0):
    return SimRequest(f"1:{group}:{member}", prompt, (Turn(tokens),))


def finish_all(engine):
    events = []
    while (at_ns := engine.next_ns()) is not None:
        events += engine.advance(at_ns)
    return events


# ---- closed form


def test_a_request_alone_takes_its_prefill_and_a_step_for_every_token():
    model = StepModel(0.010, 0.001, 1e-6, prefill_token_s=1e-4, prefill_pair_s=1e-7)
    engine = DecodeEngine(model, 10_000, 8)
    engine.add(5, one_turn(0, 300, 200))
    (event,) = finish_all(engine)
    steps_s = sum(model.seconds(1, 300 + done) for done in range(200))
    assert event.at_ns == pytest.approx(5 + 1e9 * (model.prefill_batch_seconds(300, 300 * 299 // 2) + steps_s), abs=2)


def test_a_request_that_comes_waits_for_the_step_under_way_and_no_longer():
    engine = DecodeEngine(StepModel(0.010, 0.0, 0.0), 10_000, 8)
    engine.add(0, one_turn(0, 1, 100))
    engine.next_ns()  # 10 ms prefill, then steps of 10 ms
    engine.advance(105 * MS)
    engine.add(105 * MS, one_turn(1, 1, 1, group=1))
    assert [(event.sample, event.at_ns) for event in finish_all(engine)] == [
        ("1:1:1", (110 + 10 + 10) * MS),
        ("1:0:0", (10 + 1000 + 10) * MS),
    ]


@st.composite
def scripts(draw):
    block = draw(st.sampled_from([1, 3, 4, 16]))
    capacity = draw(st.integers(40, 160))
    count = draw(st.integers(1, 10))
    usable = capacity // block * block
    script = []
    for member in range(count):
        turns = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 40), st.integers(0, 4)), max_size=2))
        turns = [Turn(tokens, ms * MS, added) for tokens, ms, added in turns]
        left = usable - sum(turn.decode_tokens + turn.tool_tokens for turn in turns)
        prompt = draw(st.integers(1, max(1, min(left - 1, 30))))
        tokens = draw(st.integers(1, max(1, left - prompt)))
        request = SimRequest(f"1:{draw(st.integers(0, 2))}:{member}", prompt, (*turns, Turn(tokens)))
        if request.total_tokens <= usable:
            script.append((draw(st.integers(0, 60)) * MS, "add", request))
    for _ in range(draw(st.integers(0, 4)) if script else 0):
        script.append((draw(st.integers(0, 400 * MS)), "move", draw(st.sampled_from(script))[2]))
    script = [(at, kind, what if kind == "add" or isinstance(what, str) else what.sample) for at, kind, what in script]
    return block, capacity, script


@settings(max_examples=200, deadline=None)
@given(
    scripts(),
    st.integers(1, 6),
    st.sampled_from(["priority", "arrival"]),
    st.sampled_from([0.0, 1e-6, 1.7e-4]),
    st.sampled_from([(), (1, 2, 4)]),
)
def test_jumps_end_where_steps_one_by_one_do(scripted, max_running, order, per_kv_token_s, buckets):
    block, capacity, script = scripted
    model = StepModel(0.005, 0.0013, per_kv_token_s, buckets, prefill_token_s=2e-4, prefill_pair_s=1e-6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "MOST_PASSES", 3)
        patch.setattr(waiting, "MOST_WAIT_S", 0.2)
        patch.setattr(decode, "PREFILL_TOKENS", 40)
        patch.setattr("token_engine.PREFILL_TOKENS", 40)
        jumping = DecodeEngine(model, capacity, max_running, order, block)
        stepping = TokenEngine(model, capacity, max_running, order, block, passes=3, wait_s=0.2)
        found = follow(jumping, script)
        assert found == follow(stepping, script)
    finished = [event[1] for event in found if event[2:3] == ("finished",)]
    assert sorted(finished) == sorted(what.sample for _, kind, what in script if kind == "add")
    figures = ("tokens_generated", "prefilled_tokens", "reused_tokens", "preemptions")
    assert [getattr(jumping, name) for name in figures] == [getattr(stepping, name) for name in figures]


# ---- what it holds


PLAIN = StepModel(0.010, 0.001, 0.0, prefill_token_s=1e-4)


@settings(max_examples=60, deadline=None)
@given(scripts(), st.integers(1, 6))
def test_keys_and_values_never_take_more_than_there_is(scripted, max_running):
    block, capacity, script = scripted
    engine = DecodeEngine(PLAIN, capacity, max_running, block_tokens=block)
    for at_ns, kind, what in sorted(script, key=lambda line: line[0]):
        if kind == "add":
            engine.advance(at_ns)
            engine.add(at_ns, what)
    while (at_ns := engine.next_ns()) is not None:
        assert engine.kv_share <= 1 and engine.kv_tokens <= capacity and engine.running <= max_running
        engine.advance(at_ns)
    assert (engine.running, engine.waiting, engine.kv_tokens, engine.kv_share) == (0, 0, 0, 0)


def test_the_last_one_taken_in_gives_way_when_memory_is_short_and_is_not_lost():
    engine = DecodeEngine(PLAIN, 96, 8, block_tokens=16)
    engine.add(0, one_turn(0, 10, 60))
    engine.add(0, one_turn(1, 10, 70, group=1))
    assert [event.sample for event in finish_all(engine)] == ["1:0:0", "1:1:1"]
    assert engine.preemptions >= 1 and engine.tokens_generated == 130


def test_more_requests_than_places_wait():
    engine = DecodeEngine(PLAIN, 10_000, 2)
    for member in range(5):
        engine.add(0, one_turn(member, 10, 10 + member))
    engine.advance(engine.next_ns())
    assert (engine.running, engine.waiting) == (2, 3)
    assert [event.tokens_done for event in finish_all(engine)] == [10, 11, 12, 13, 14]


def test_figures_are_those_of_the_last_call_with_a_time():
    engine = DecodeEngine(StepModel(0.010, 0.0, 0.0), 10_000, 8)
    engine.add(0, one_turn(0, 5, 100))
    engine.next_ns()
    assert engine.advance(519 * MS) == []  # 10 ms of prefill, 50 whole steps
    assert (engine.tokens_done(), engine.kv_tokens, engine.tokens_generated) == ({"1:0:0": 50}, 55, 50)


# ---- order


def finish_order(engine):
    return [event.sample.rpartition(":")[2] for event in finish_all(engine)]


def after_tool(member, group=0):
    return SimRequest(f"1:{group}:{member}", 10, (Turn(20, 0, 5), Turn(20)))


def test_what_comes_back_from_a_tool_goes_before_those_that_wait_for_their_first_turn():
    for order, expected in (("priority", ["0", "3", "1", "2"]), ("arrival", ["0", "1", "2", "3"])):
        engine = DecodeEngine(PLAIN, 10_000, 1, order)
        for member in range(3):
            engine.add(0, one_turn(member, 10, 20, group=member))
        engine.next_ns()
        engine.add(1, after_tool(3, group=9), tokens_done=25)
        assert finish_order(engine) == expected


def test_members_of_a_group_whose_prompt_is_there_go_before_others():
    engine = DecodeEngine(PLAIN, 10_000, 1)
    for member, group in enumerate((0, 1, 0, 1)):
        engine.add(0, one_turn(member, 50, 20, group))
    assert finish_order(engine) == ["0", "2", "1", "3"]
    # Of a prompt that is there one token is computed again.
    assert (engine.prefilled_tokens, engine.reused_tokens) == (50 + 1 + 50 + 1, 49 + 49)


def test_who_waited_too_long_goes_before_everybody(monkeypatch):
    monkeypatch.setattr(waiting, "MOST_WAIT_S", 1.0)
    engine = DecodeEngine(PLAIN, 10_000, 1)
    engine.add(0, one_turn(0, 10, 200))  # 2.2 s
    engine.add(0, one_turn(1, 10, 20, group=1))
    engine.next_ns()
    engine.add(1_500 * MS, after_tool(2, group=2), tokens_done=25)
    assert finish_order(engine) == ["0", "1", "2"]


# ---- turns, prefixes


def test_an_answer_leaves_at_its_tool_call_and_goes_on_from_its_prefix():
    engine = DecodeEngine(PLAIN, 10_000, 8)
    request = SimRequest("1:0:0", 100, (Turn(20, 2_000 * MS, 5), Turn(30)))
    engine.add(0, request)
    (event,) = finish_all(engine)
    assert (event.kind, event.tokens_done, event.turn) == ("turn", 20, 0)
    engine.add(event.at_ns + 2_000 * MS, request, event.tokens_done + 5)
    (event,) = finish_all(engine)
    assert (event.kind, event.tokens_done, event.turn) == ("finished", 55, 1)
    assert (engine.prefilled_tokens, engine.reused_tokens) == (100 + 5, 120)


def test_prefixes_are_given_up_oldest_first_where_their_memory_is_needed():
    engine = DecodeEngine(PLAIN, 160, 1, block_tokens=1)
    first, second = (SimRequest(f"1:{group}:0", 50, (Turn(10, 1, 1), Turn(5))) for group in (0, 1))
    for request in (first, second):
        engine.add(0, request)
    finish_all(engine)
    engine.add(10**10, one_turn(0, 50, 5, group=2))  # 60 + 60 tokens are kept: only the second prefix stays
    finish_all(engine)
    for request in (second, first):
        reused = engine.reused_tokens
        engine.add(2 * 10**10, request, 11)
        engine.next_ns()
        finish_all(engine)
        assert (engine.reused_tokens - reused > 0) == (request is second)


def test_new_weights_make_every_prefix_worthless():
    engine = DecodeEngine(PLAIN, 10_000, 8)
    engine.add(0, one_turn(0, 100, 20))
    with pytest.raises(EngineError, match="1 requests are in the engine"):
        engine.flush()
    finish_all(engine)
    engine.flush()
    engine.add(10**10, one_turn(1, 100, 20))
    finish_all(engine)
    assert (engine.prefilled_tokens, engine.reused_tokens) == (200, 0)


# ---- leaving


def test_a_request_that_is_taken_out_has_the_tokens_of_the_steps_that_are_over():
    engine = DecodeEngine(StepModel(0.010, 0.0, 0.0), 10_000, 8)
    engine.add(0, one_turn(0, 5, 100))
    engine.add(0, one_turn(1, 5, 100))
    engine.next_ns()
    assert engine.remove(119 * MS, "1:0:0") == 10
    # The step under way still ends at 120 ms.
    assert engine.next_ns() == 120 * MS
    assert finish_all(engine)[0].at_ns == 1010 * MS
    engine.add(2_000 * MS, one_turn(0, 5, 100), tokens_done=10)
    assert finish_all(engine)[0].tokens_done == 100


def test_one_that_finished_before_it_was_taken_out_is_told_by_its_event_alone():
    engine = DecodeEngine(StepModel(0.010, 0.0, 0.0), 10_000, 8)
    engine.add(0, one_turn(0, 5, 10))
    engine.next_ns()
    assert engine.remove(500 * MS, "1:0:0") is None
    assert engine.next_ns() == 110 * MS
    assert [event.sample for event in engine.advance(500 * MS)] == ["1:0:0"]
    with pytest.raises(EngineError, match="1:0:0 is not in this engine"):
        engine.remove(500 * MS, "1:0:0")


def test_what_an_engine_cannot_hold_is_refused_with_the_arithmetic():
    engine = DecodeEngine(PLAIN, 100, 8)
    with pytest.raises(EngineError, match="has 97 tokens at its end = 7 blocks of 16; the engine has 6"):
        engine.add(0, one_turn(0, 50, 47))
    engine.add(0, one_turn(0, 50, 46))
    with pytest.raises(EngineError, match="1:0:0 is in this engine already"):
        engine.add(0, one_turn(0, 50, 46))


def test_an_engine_whose_steps_take_no_time_is_refused():
    with pytest.raises(EngineError, match="takes no time"):
        DecodeEngine(StepModel(0.0, 0.0, 1e-6), 100, 8)
