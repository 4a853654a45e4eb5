import pytest

from dynarl.dataflow.store import Store
from dynarl.wire import ToolCall, Trajectory, pack_floats, pack_ids

S = "3:17:0"


def answer(length: int, finish: str = "abort", version: int = 4, scored: bool = False, sample: str = S) -> Trajectory:
    logprobs = pack_floats([-0.5] * length)
    return Trajectory(sample, pack_ids([1, 2]), pack_ids(range(length)), logprobs, old_logprobs=logprobs if scored else None,
                      finish=finish, version=version)


@pytest.mark.parametrize("held, came, kept", [
    (answer(3), answer(5), 5),
    (answer(5), answer(3), 5),
    (answer(5), answer(3, "stop"), 3),
    (answer(5, "stop"), answer(7), 5),
    (answer(5, "stop"), answer(6, "stop"), 5),
    (answer(5, "stop", scored=True), answer(6, "length"), 5),
    (answer(5, "stop"), answer(5, "stop", scored=True), 5),
    (answer(9, "stop", scored=True), answer(2, version=5), 2),
], ids=["longer part", "shorter part", "complete over part", "part over complete", "second answer", "second over scored",
        "scored over complete", "newer weights"])
def test_what_is_further_on_stays(held, came, kept):
    store = Store()
    store.put(held)
    store.put(came)
    assert store.get([S])[0].num_response_tokens == kept


def test_the_scored_answer_replaces_the_unscored():
    store = Store()
    store.put(answer(5, "stop"))
    store.put(answer(5, "stop", scored=True))
    assert store.get([S])[0].old_logprobs is not None


def test_forgetting_takes_this_and_earlier_iterations():
    store = Store()
    for iteration in (2, 3, 4, 10):
        store.put(answer(1, sample=f"{iteration}:0:0"))
    store.forget(3)
    assert len(store) == 2
    assert [t.sample for t in store.get(["10:0:0", "4:0:0"])] == ["10:0:0", "4:0:0"]


def test_a_sample_that_is_not_here_is_named():
    with pytest.raises(KeyError, match="3:17:0"):
        Store().get([S])


def part(start: int, length: int, sample: str = S, version: int = 4) -> dict:
    return {"sample": sample, "prompt": pack_ids([1, 2]), "start": start, "response": pack_ids(range(start, start + length)),
            "logprobs": pack_floats([-0.5] * length), "version": version}


def test_parts_add_up_to_the_answer_so_far():
    store = Store()
    assert not store.has_part(S)
    store.extend(**part(0, 3))
    store.extend(**part(3, 2))
    assert store.has_part(S)
    held = store.get([S])[0]
    assert (held.response, len(held.rollout_logprobs)) == (pack_ids(range(5)), 20)
    assert (held.prompt, held.finish, held.version) == (pack_ids([1, 2]), "abort", 4)


def test_a_part_after_a_gap_is_dropped_and_one_that_overlaps_counts_once():
    store = Store()
    store.extend(**part(0, 3))
    store.extend(**part(5, 2))
    assert store.get([S])[0].num_response_tokens == 3
    store.extend(**part(1, 4))
    assert store.get([S])[0].response == pack_ids(range(5))
    store.extend(**part(0, 2))
    assert store.get([S])[0].num_response_tokens == 5


def test_parts_of_a_new_attempt_do_not_mix_with_those_of_the_one_before():
    store = Store()
    store.put(answer(5))
    store.begin(Trajectory(S, pack_ids([1, 2]), b"", b""))  # it starts again, and comes to other tokens
    assert not store.has_part(S)
    for start in (0, 4):
        store.extend(**part(start, 4) | {"response": pack_ids(range(100 + start, 104 + start))})
    assert store.get([S])[0].response == pack_ids(range(100, 108))
    store.put(answer(9, "stop"))
    store.begin(answer(3))
    assert store.get([S])[0].finish == "stop"  # what was reported of it stays


def test_a_part_that_comes_late_does_not_touch_the_whole_answer():
    store = Store()
    store.put(answer(5, "stop"))
    store.extend(**part(5, 2))
    assert store.get([S])[0].finish == "stop" and not store.has_part(S)


def test_a_part_continues_what_another_node_has_begun():
    store = Store()
    store.put(answer(4))
    store.extend(**part(4, 3))
    assert store.get([S])[0].response == pack_ids(range(7))


def test_a_tool_call_is_found_by_what_asked_for_it_until_its_iteration_is_forgotten():
    store = Store()
    call = ToolCall("3:17:0", 1, b"turn", b"output", b"", 0.1)
    store.record(call)
    assert store.call("3:17:0", 1, b"turn") == call
    assert store.call("3:17:0", 0, b"turn") is store.call("3:17:1", 1, b"turn") is None
    assert store.call("3:17:0", 1, b"another turn") is None, "an answer begun again may come to another call"
    store.forget(3)
    assert store.call("3:17:0", 1, b"turn") is None
