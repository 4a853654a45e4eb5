"""A small simulated job, for tests."""

from dynarl.config.schema import Algorithm, Cluster, Config, Policy, Rollout, Split
from dynarl.perf.rollout import StepModel
from dynarl.sim.workload import Lengths, Tools, Workload
from dynarl.sim.world import Times, World

STEP = StepModel(fixed_s=0.008, per_request_s=3e-5, per_kv_token_s=1e-8, prefill_token_s=2e-5)
TOOLS = Tools(mean_calls=2, most_calls=5, median_s=3.0, sigma=0.8, tokens=Lengths(median=80, cap=200))
LAWS = Lengths(median=400, sigma=0.8, cap=2048, correlation=0.5)


class Network:
    """Latency by the number of members, and a rate."""

    def seconds(self, op, group, num_bytes):
        return 1e-5 * len(group) + num_bytes / 2e10


def homes(rollout: int, inference: int, training: int) -> dict[str, str]:
    roles = ["training"] * training + ["inference"] * inference + ["rollout"] * rollout
    return {f"n{index}": role for index, role in enumerate(roles)}


def world(policy="adaptive", split=(4, 1, 1), groups=8, size=4, tools=None, response=LAWS, lend=True, **changes):
    rollout, inference, training = split
    config = Config(
        cluster=Cluster(nodes=sum(split)),
        split=Split(rollout=rollout, inference=inference, training=training),
        policy=Policy(name=policy, lend_owners=lend),
        algorithm=Algorithm(
            prompts_per_step=groups, group_size=size, minibatches=2, membership="completion", max_prompt_tokens=256,
            max_response_tokens=4096,
        ),
        rollout=Rollout(max_running=16),
    )  # fmt: skip
    workload = Workload(
        prompts=groups, group_size=size, prompt=Lengths(median=100, cap=256), response=response, tools=tools
    )
    given = {
        "config": config, "homes": homes(*split), "gpus_per_device": 4, "engines_per_device": 2, "step": STEP,
        "kv_capacity_tokens": 60_000, "draw": workload.draw, "network": Network(), "gradient_bytes": 10**10,
        "weight_bytes": 10**10, "figures_s": 1.0,
        "times": Times(
            inference=lambda sizes: 0.02 + 2e-5 * sum(map(sum, sizes)),
            training=lambda sizes: 0.05 + 6e-5 * sum(map(sum, sizes)),
            optimizer=lambda devices: 0.5, transfer=lambda source, target: 0.5, load=lambda role: 0.2, restart_s=5.0,
        ),
    }  # fmt: skip
    return World(**{**given, **changes})
