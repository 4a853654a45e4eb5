"""Rankings that RLinf (OSDI'26) publishes, from one set of constants: which way to place stages wins where.

Lengths of answers are not published; those of the files in configs/plans are ours.
"""

from pathlib import Path

import pytest
import yaml

from dynarl.errors import ConfigError
from dynarl.scheduler.placement.plan import Alone, Execution, SideBySide, mode
from dynarl.scheduler.placement.problem import parse, pose
from dynarl.scheduler.placement.search import chain, find_schedule

PLANS = Path(__file__).parents[2] / "configs" / "plans"


def problem(name, **changed):
    return parse(yaml.safe_load((PLANS / f"{name}.yaml").read_text()) | changed, name)


def seconds(problem, wanted="any"):
    posed = pose(problem, mode=wanted)
    found = find_schedule(
        posed.flow, posed.stages, problem.devices, problem.groups, unit=posed.unit, mode=wanted, sync_s=posed.sync_s
    )
    return found[0].seconds


@pytest.mark.parametrize("name", sorted(path.stem for path in PLANS.glob("*.yaml")))
def test_a_plan_file_has_a_solution(name):
    posed = pose(problem(name))
    assert find_schedule(posed.flow, posed.stages, posed.problem.devices, posed.problem.groups, unit=posed.unit)


@pytest.mark.parametrize("devices", [64, 128, 256])
def test_grpo_on_long_answers_is_faster_in_turn(devices):
    """Published for 7B: spatial 44 to 69 % slower than a collocated system."""
    case = problem("grpo-7b-math", devices=devices)
    assert seconds(case) == pytest.approx(seconds(case, "temporal"))
    assert 1.1 < seconds(case, "spatial") / seconds(case, "temporal") < 1.7


@pytest.mark.parametrize(
    ("model", "devices", "groups"),
    [
        ("qwen2.5-1.5b", 16, 256), ("qwen2.5-1.5b", 32, 512), ("qwen2.5-1.5b", 64, 1024),
        ("qwen2.5-7b", 32, 256), ("qwen2.5-7b", 64, 512), ("qwen2.5-14b", 64, 256), ("qwen2.5-14b", 128, 512),
    ],
)  # fmt: skip
def test_ppo_is_faster_side_by_side(model, devices, groups):
    """Published: 27 to 70 % faster than a collocated system; four stages beside a rollout with few requests."""
    case = problem("ppo-7b", model=model, devices=devices, groups=groups, unit="device")
    assert seconds(case, "temporal") / seconds(case, "spatial") > 1.1


def halves(devices):
    """Best over chunks of half of the devices for rollout and half for training, against all in turn: their ratio."""
    case = problem("moe-30b-a3b", devices=devices)
    posed = pose(case)
    plans = [SideBySide(Alone(0, devices // 2), Alone(1, devices // 2), devices, n) for n in chain(case.groups)[1:]]
    apart = min(Execution(posed.flow, posed.stages, case.groups, posed.sync_s).run(plan) for plan in plans)
    return seconds(case, "temporal") / apart


def test_experts_side_by_side_win_on_few_devices_and_lose_on_many():
    """Published for Qwen3-30B-A3B in halves: 31 % faster on 32 GPUs, 7 % on 64, slower on 128."""
    few, more, many = halves(32), halves(64), halves(128)
    assert few > more > 1 > many


def test_a_search_finds_a_split_where_halves_lose():
    case = problem("moe-30b-a3b", devices=128)
    assert seconds(case, "spatial") < seconds(case, "temporal") < seconds(case, "temporal") / halves(128)


def test_a_simulator_on_gpus_is_best_beside_its_policy_with_training_in_turn():
    """Published for ManiSkill: hybrid 52 to 69 % faster than temporal, 61 to 87 % faster than spatial."""
    case = problem("embodied-gpu-simulator")
    best, temporal, spatial = (seconds(case, wanted) for wanted in ("any", "temporal", "spatial"))
    assert temporal / best > 1.4
    assert spatial / best > 1.4
    posed = pose(case)
    found = find_schedule(posed.flow, posed.stages, case.devices, case.groups)[0]
    assert mode(found.plan) == "temporal"  # training in turn with the cycle,
    assert posed.stages[0].layout(case.devices, case.groups, True).degrees["batches"] > 1  # whose members lie apart


def test_a_simulator_on_cpus_is_best_in_turn():
    """Published for LIBERO: temporal."""
    case = problem("embodied-cpu-simulator")
    assert seconds(case) == pytest.approx(seconds(case, "temporal"))
    assert seconds(case, "spatial") > 1.2 * seconds(case)


def test_a_model_that_fits_nowhere_is_refused_with_the_arithmetic():
    case = problem("grpo-7b-math", model="llama2-70b", devices=8)
    with pytest.raises(ConfigError, match=r"training: .* weights .* \+ gradients .* = .* GB a device > "):
        seconds(case)
