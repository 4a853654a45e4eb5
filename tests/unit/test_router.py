"""What the controller makes of the ledger and of the workers' reports. The clock is a number."""

from collections import Counter

import pytest

from dynarl import wire
from dynarl.config.schema import Algorithm, Cluster, Config, Rollout
from dynarl.controller.router import Router
from dynarl.dataflow.ledger import Ledger
from dynarl.scheduler.survival import Lengths


def setting(groups: int = 4, size: int = 4, max_running: int = 16, devices: int = 1,
            max_queued: int = 0) -> tuple[Router, Ledger]:
    config = Config(rollout=Rollout(max_running=max_running, max_queued=max_queued), cluster=Cluster(devices_per_node=devices),
                    algorithm=Algorithm(max_response_tokens=200))
    return Router(config, Lengths(200)), Ledger([wire.sample_id(1, g, m) for g in range(groups) for m in range(size)])


def hand_out(router: Router, ledger: Ledger, nodes: list[str], now: float = 0.0) -> dict[str, list[str]]:
    assigned = router.place(ledger, nodes, now)
    for node, samples in assigned.items():
        ledger.dispatch(node, samples)
    return assigned


def report(router: Router, steps_per_s: dict[str, float], running: int = 4, kv_total_tokens: int = 0) -> None:
    for second in range(10):
        for node, rate in steps_per_s.items():
            router.figures(node, float(second), worker=f"{node}-rollout-0", tokens=int(second * rate * running), running=running,
                           kv_total_tokens=kv_total_tokens)


def test_everything_that_fits_is_handed_out_and_the_rest_waits():
    router, ledger = setting(groups=4, size=4, max_running=6)
    assigned = hand_out(router, ledger, ["n1", "n2"])
    assert {node: len(samples) for node, samples in assigned.items()} == {"n1": 6, "n2": 6}
    assert ledger.num_waiting == 4
    assert hand_out(router, ledger, ["n1", "n2"]) == {}
    assert hand_out(router, ledger, []) == {}


def test_a_node_that_may_queue_is_given_more_and_its_memory_counts_for_those_in_turn():
    router, ledger = setting(groups=8, size=4, max_running=2, max_queued=8)
    report(router, {"n1": 10, "n2": 10}, kv_total_tokens=328)  # two requests of 64 of prompt and 100 expected
    assigned = hand_out(router, ledger, ["n1", "n2"], now=10.0)
    assert {node: len(samples) for node, samples in assigned.items()} == {"n1": 10, "n2": 10}
    assert (ledger.num_waiting, hand_out(router, ledger, ["n1", "n2"], now=10.0)) == (12, {})


def test_queued_requests_get_on_more_slowly():
    alone, queued = setting(groups=1, size=2, max_running=2), setting(groups=4, size=2, max_running=2, max_queued=8)
    so_far = []
    for router, ledger in (alone, queued):
        report(router, {"n1": 10}, running=2)
        hand_out(router, ledger, ["n1"], now=10.0)
        so_far.append(router._instance(ledger, "n1", 14.0).running[0].prefix - 64)
    assert so_far[1] == pytest.approx(so_far[0] / 4)


def test_devices_of_a_node_count_together():
    router, ledger = setting(groups=4, size=4, max_running=3, devices=2)
    assert len(hand_out(router, ledger, ["n1"])["n1"]) == 6


def test_what_was_given_back_goes_first():
    router, ledger = setting(groups=2, size=2, max_running=4)
    hand_out(router, ledger, ["n1"])
    for sample in ("1:1:0", "1:1:1"):
        ledger.returned(sample, "n1", holder="n1")
        router.given_back(sample, 20)
    router_two, later = setting(groups=2, size=2, max_running=2)
    later.dispatch("n1", ["1:1:0"])
    later.returned("1:1:0", "n1", holder="n1")
    assert later.waiting(2) == ["1:1:0", "1:0:0"]
    assert sorted(hand_out(router_two, later, ["n2"])["n2"]) == ["1:0:0", "1:1:0"]


def test_a_slow_node_gets_less_once_that_is_seen():
    router, ledger = setting(groups=8, size=4, max_running=32)
    report(router, {"n1": 10, "n2": 10, "n3": 1})
    assigned = hand_out(router, ledger, ["n1", "n2", "n3"], now=10.0)
    assert len(assigned.get("n3", [])) <= 4 and abs(len(assigned["n1"]) - len(assigned["n2"])) <= 1


def test_a_partial_answer_returns_to_the_node_that_has_its_prefix_at_equal_load():
    router, ledger = setting(groups=4, size=1)
    report(router, {"n1": 10, "n2": 10})
    hand_out(router, ledger, ["n1", "n2"], now=10.0)
    assert Counter(ledger.running.values()) == {"n1": 2, "n2": 2}
    sample = ledger.running_on("n2")[0]
    ledger.returned(sample, "n2", holder="n2")
    router.given_back(sample, 50)
    assert hand_out(router, ledger, ["n1", "n2"], now=10.0) == {"n2": [sample]}


def test_memory_of_the_engines_is_a_limit_once_they_have_said_what_they_hold():
    router, ledger = setting(groups=4, size=4)
    report(router, {"n1": 10, "n2": 10}, kv_total_tokens=500)  # a request takes 64 of prompt and 100 expected
    assert {n: len(s) for n, s in hand_out(router, ledger, ["n1", "n2"], now=10.0).items()} == {"n1": 3, "n2": 3}


def test_requests_move_away_from_a_node_that_has_become_slow():
    router, ledger = setting(groups=4, size=4)
    assert router.moves(ledger, ["n1", "n2"], 0.0) == []  # nothing is known of speeds
    hand_out(router, ledger, ["n1", "n2"])
    report(router, {"n1": 10, "n2": 1}, running=8)
    moves = router.moves(ledger, ["n1", "n2"], 10.0)
    assert moves and {(move.source, move.target) for move in moves} == {("n2", "n1")}
    assert router.moves(ledger, ["n2"], 10.0) == []  # never from the only one


def test_a_dear_move_is_not_made():
    router, ledger = setting(groups=4, size=4)
    hand_out(router, ledger, ["n1", "n2"])
    report(router, {"n1": 10, "n2": 1}, running=8)
    for _ in range(20):
        router.moved(1000.0)
    assert router.move_s == pytest.approx(2000.0, rel=0.1)
    assert router.moves(ledger, ["n1", "n2"], 10.0) == []


def test_what_remains_is_learned_from_answers_that_finished():
    router, ledger = setting(groups=8, size=2, max_running=8)
    for _ in range(20):
        router._lengths.finished(30)
        router.finished("1:9:0", prompt_tokens=12)
    router.place(ledger, ["n1"], 0.0)
    assert router._request("1:0:0", 0, None).remaining == 30
    assert (router._request("1:0:0", 10, "n1").prefix, router._request("1:0:0", 10, "n1").remaining) == (22, 20)


def test_tokens_that_tools_wrote_are_prefix_but_no_progress_of_an_answer():
    router, ledger = setting(groups=1, size=2)
    first, second = hand_out(router, ledger, ["n1"])["n1"]
    for sample, masked_tokens in ((first, 0), (second, 40)):
        ledger.returned(sample, "n1", holder="n1")
        router.given_back(sample, 50, masked_tokens)
    plain, tools = (router._request(sample, 50, "n1") for sample in (first, second))
    assert plain.prefix == tools.prefix and tools.remaining == router._request(first, 10, "n1").remaining
    assert plain.remaining != tools.remaining
