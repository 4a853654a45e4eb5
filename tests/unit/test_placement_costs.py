import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.hypergraph import workflow
from dynarl.perf.device import load_device
from dynarl.perf.model import ModelCost
from dynarl.scheduler.placement.cycle import Cycle, Turn
from dynarl.scheduler.placement.flow import Flow
from dynarl.scheduler.placement.generation import Generation
from dynarl.scheduler.placement.lengths import Lengths
from dynarl.scheduler.placement.passes import Passes, Replica
from dynarl.scheduler.placement.problem import parse, pose

DEVICE, MODEL = load_device("h100"), ModelCost.of("qwen2.5-7b")
LENGTHS = Lengths(prompt=500, median=6000, sigma=0.9, cap=28000)
SIZES = np.array([8, 16, 32, 64, 128, 256, 1024])


def passes(index, **changed):
    """The stage of inference (1) or training (2) of a job with a 7B model."""
    given = dict(
        model="qwen2.5-7b", device="h100", devices=1024, groups=512, group_size=16,
        lengths=msgspec.to_builtins(LENGTHS),
    )  # fmt: skip
    return pose(parse(given | changed, "x")).stages[index]


def test_the_mean_of_a_law_is_that_of_draws():
    drawn = np.minimum(
        LENGTHS.median * np.exp(LENGTHS.sigma * np.random.default_rng(1).standard_normal(400_000)), LENGTHS.cap
    )
    assert LENGTHS.mean == pytest.approx(drawn.mean(), rel=0.01)
    assert LENGTHS.mean_context == pytest.approx(LENGTHS.prompt + (drawn**2).mean() / (2 * drawn.mean()), rel=0.01)


@pytest.mark.parametrize(
    ("name", "value"), [("cap", 0), ("median", 0.5), ("correlation", 2), ("prompt", -1), ("median", 1e9)]
)
def test_a_law_that_cannot_be_is_refused_with_its_value(name, value):
    with pytest.raises(ValueError, match=f"{name} = "):
        msgspec.structs.replace(LENGTHS, **{name: value})


def test_a_rollout_is_proportional_to_devices_while_requests_queue_and_then_levels_off():
    stage = Generation(DEVICE, MODEL, LENGTHS, group_size=16)
    seconds = stage.seconds(SIZES, 512, False)
    assert (np.diff(seconds) <= 0).all()
    assert seconds[0] / seconds[1] > 1.8
    assert seconds[-2] / seconds[-1] < 1.35
    # However many devices, the longest answer takes its steps one after the other.
    assert seconds[-1] > LENGTHS.cap * stage.engines[-1].step.fixed_s


def test_kv_memory_limits_what_runs_and_shared_devices_have_less_of_it():
    roomy = Generation(DEVICE, MODEL, LENGTHS, group_size=16, max_running=(10**6, 10**6))
    assert roomy.engines[0].slots[0] < roomy.engines[1].slots[0] / 2  # weights once for twice the memory
    crowded = Generation(DEVICE, MODEL, LENGTHS, group_size=16, max_running=(10**6, 10**6), residue_bytes=20e9)
    assert crowded.engines[0].slots[1] < crowded.engines[0].slots[0]
    assert crowded.seconds(SIZES, 512, True)[0] > crowded.seconds(SIZES, 512, False)[0]


@settings(max_examples=30, deadline=None)
@given(st.floats(200, 8000), st.floats(0.0, 1.3), st.integers(1, 16), st.integers(1, 2000), st.integers(1, 6))
def test_groups_complete_one_after_the_other_up_to_the_end(median, sigma, group_size, groups, turns):
    lengths = Lengths(prompt=300, median=median, sigma=sigma, cap=16000, turns=turns, tool_s=1.5, tool_tokens=50)
    stage = Generation(DEVICE, MODEL, lengths, group_size)
    ready = stage.release(SIZES, groups, False, 32)
    assert (np.diff(ready, axis=1) >= -1e-9).all()
    assert ready[:, -1] == pytest.approx(stage.seconds(SIZES, groups, False))
    assert (ready[:, 0] > 0).all()


def test_tools_make_a_rollout_longer_and_short_of_cpus_much_longer():
    plain = Generation(DEVICE, MODEL, LENGTHS, 16).seconds(SIZES, 512, False)
    tools = msgspec.structs.replace(LENGTHS, turns=6, tool_s=2.0)
    some, few = (Generation(DEVICE, MODEL, tools, 16, tool_workers=n).seconds(SIZES, 512, False) for n in (64, 1))
    assert (some > plain).all()
    assert few[0] == pytest.approx(8192 * 5 * 2.0)  # one node's one worker makes all calls


def test_training_falls_where_the_busiest_replica_gets_a_sequence_less():
    stage = passes(2)
    for devices in (64, 256):
        both = stage.seconds(np.array([devices, devices + 8]), 512, False)
        assert both[1] <= both[0]
    halved = stage.seconds(np.array([64, 128]), 512, False)
    assert halved[0] / halved[1] == pytest.approx(2, rel=0.1)


def test_training_takes_several_times_as_long_as_inference():
    inference, training = (passes(index).seconds(np.array([64]), 512, False)[0] for index in (1, 2))
    assert 3 < training / inference < 6


def test_a_layout_fits_into_memory_and_a_larger_model_is_cut_finer():
    for model, least in (("qwen2.5-7b", 1), ("qwen2.5-72b", 8)):
        layout = passes(2, model=model).layout(256, 512.0, False)
        assert sum(layout.memory_bytes.values()) <= DEVICE.memory_bytes
        assert layout.degrees["tp"] * layout.degrees["pp"] >= least
        assert layout.used == layout.degrees["tp"] * layout.degrees["pp"] * layout.degrees["dp"]


def test_more_replicas_hold_less_of_the_optimizer_each():
    stage = passes(2, model="qwen2.5-32b")
    seconds = stage.seconds(np.array([8, 16, 64]), 512, False)
    assert np.isinf(seconds[0]) and np.isfinite(seconds[2])
    assert "optimizer" in stage.why_not(8)


ENVIRONMENT, POLICY = Turn("environment", 0.05, 0.010), Turn("policy", 0.05, 0.012)


def brute_force(cycle, devices, items):
    """Rounds of a cycle, batch by batch, on every split."""
    together = cycle.rounds * (
        cycle.first.seconds(np.array([devices]), items)
        + cycle.second.seconds(np.array([devices]), items)
        + cycle.switch_s
    )
    best = float(together[0])
    for given in range(1, devices):
        for batches in (1, 2, 3, 4):
            a = float(cycle.first.seconds(np.array([given]), items / batches)[0])
            b = float(cycle.second.seconds(np.array([devices - given]), items / batches)[0])
            free, ready = [0.0, 0.0], [0.0] * batches
            for _ in range(cycle.rounds):
                for batch in range(batches):
                    for member, seconds in enumerate((a, b)):
                        ready[batch] = free[member] = max(free[member], ready[batch]) + seconds
            best = min(best, max(ready))
    return best


@settings(max_examples=30, deadline=None)
@given(
    st.builds(Turn, st.just("a"), st.floats(0.01, 1), st.floats(0.001, 0.1)),
    st.builds(Turn, st.just("b"), st.floats(0.01, 1), st.floats(0.001, 0.1)),
    st.integers(2, 9),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.5]),
)
def test_a_cycle_takes_what_its_rounds_take_batch_by_batch_on_the_best_split(first, second, devices, rounds, switch_s):
    cycle = Cycle(first, second, rounds, switch_s=switch_s)
    assert cycle.seconds(np.array([devices]), 24, False)[0] == pytest.approx(brute_force(cycle, devices, 24))


def test_a_cycle_is_never_slower_than_evenly_split_and_faster_where_one_member_has_more_to_do():
    slow = Turn("policy", 0.05, 0.05)
    best, even = (
        Cycle(ENVIRONMENT, slow, 80, 0.0, way=way).seconds(np.array([8]), 256, False)[0] for way in ("any", "even")
    )
    assert best < 0.75 * even


def test_items_that_do_not_fit_on_one_member_need_more_of_its_devices():
    cycle = Cycle(Turn("environment", 0.05, 0.001, most=32), POLICY, 10, together_most=0.0)
    assert cycle.layout(16, 256.0, False).degrees["environment"] >= 8
    assert np.isinf(cycle.seconds(np.array([8]), 256, False)[0])


def test_components_that_feed_each_other_are_one_vertex_and_gradients_make_no_cycle():
    flow = Flow.of(workflow.declared("grpo"))
    assert flow.vertices == (("rollout",), ("inference",), ("training",))
    assert Flow.of(workflow.declared("ppo-critic")).joined(1, 2)
    declared = workflow.parse(
        {
            "about": "a cycle",
            "components": {
                "environment": {"program": "environment", "kind": "dynamic", "interruptible": "always"},
                "rollout": {"program": "rollout", "kind": "dynamic", "interruptible": "always"},
                "training": {"program": "training", "kind": "static", "interruptible": "regular"},
            },
            "channels": {
                "seen": {"producers": ["environment"], "consumers": ["rollout"], "granularity": "sample"},
                "acts": {
                    "producers": ["rollout"],
                    "consumers": ["environment"],
                    "granularity": "sample",
                    "feedback": True,
                },
                "episodes": {"producers": ["rollout"], "consumers": ["training"], "granularity": "sample"},
            },
        },
        "small",
    )
    assert Flow.of(declared).vertices == (("environment", "rollout"), ("training",))


def test_a_pipeline_fills_and_drains_once_for_each_update():
    flat = Replica(1, 1, 1, token_s=4e-3, hop_s=0.0, update_s=lambda dp: 0.0, memory=lambda dp: {"weights": 1.0})
    deep = Replica(1, 4, 1, token_s=1e-3, hop_s=0.0, update_s=lambda dp: 0.0, memory=lambda dp: {"weights": 1.0})

    def seconds(replica, updates):
        stage = Passes([replica], 8, 100.0, 100, 16, 10.0, 1.0, 1.0, updates=updates)
        return stage.seconds(np.array([4]), 16, False)[0]

    # 128 sequences of 100 tokens: (m + p - 1) slots of a tenth of a second, four times for four updates.
    assert seconds(deep, 1) == pytest.approx((128 + 3) * 0.1)
    assert seconds(deep, 4) == pytest.approx((128 + 4 * 3) * 0.1)
    assert seconds(flat, 4) == pytest.approx(32 * 0.4)
