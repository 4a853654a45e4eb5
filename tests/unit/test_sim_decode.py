"""The simulated rollout engine: when answers end, what it holds, whom it takes in."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.perf.rollout import StepModel
from dynarl.sim import decode
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
    assert event.at_ns == pytest.approx(5 + 1e9 * (model.prefill_seconds(300) + steps_s), abs=2)


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


@settings(max_examples=300, deadline=None)
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
        patch.setattr(decode, "MOST_PASSES", 3)
        patch.setattr(decode, "MOST_WAIT_S", 0.2)
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
