import json

import pytest

from dynarl.config import load, validate
from dynarl.errors import ConfigError


def faults(written):
    try:
        validate.check(load.from_text(written).config)
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    "written",
    [
        "",
        "policy: {name: static}\nsplit: {rollout: 3, inference: 0, training: 1}",  # trainers score for themselves
        "cluster: {nodes: 1}\nsplit: {rollout: 0, inference: 0, training: 1}\npolicy: {name: colocated}",
        "cluster: {devices_per_node: 4}\ntraining: {tp: 4}",  # tp a multiple of kv_heads
        "algorithm: {minibatches: 4}",
        "task: {name: 'only.on_the_nodes:Mine', args: {any: 1}}",  # not opened here
        "task: {verify_timeout_s: 600}\nfailure: {hang_s: {rollout: 5}}",  # the environment is not watched
        "training: {layouts: {2: \"pp=2,nodes=2\", 3: nodes=1}}",
        "model: {experts: 4}\ncluster: {devices_per_node: 2}\ntraining: {layouts: {2: ep=2}}",
        "cluster: {sbatch_args: [--constraint=a100, --exclude=n3]}",
        "dataflow: {chunk: {trajectories: 4, scored: all}}\npolicy: {name: colocated, switching: node}",
    ],
)
def test_what_works_is_accepted(written):
    assert faults(written) == []


@pytest.mark.parametrize(
    "written, message",
    [
        ("cluster: {nodes: 5}", "split: rollout 2 + inference 1 + training 1 = 4, but cluster.nodes = 5"),
        (
            "cluster: {nodes: 1}\nsplit: {rollout: 0, inference: 0}",
            "one node can only take all roles in turn: set policy.name to colocated",
        ),
        ("split: {rollout: 0, inference: 3}\npolicy: {name: static}", "nobody would generate"),
        ("task: {verify_timeout_s: 90}", "failure.hang_s: environment = 60 s, but task.verify_timeout_s = 90 s"),
        ("failure: {hang_s: {environment: 8}}", "environment = 8 s, but task.tool_timeout_s = 10 s"),
        (
            "dataflow: {chunk: {answers: 2}}",
            "dataflow.chunk: 'answers' is no channel of the workflow grpo on which whole groups go from one role to another; "
            "those are trajectories, scored",
        ),
        ("plan: {replan: true}\npolicy: {name: colocated}", "plan.replan with policy.name = colocated: all nodes take all roles"),
        ("plan: {replan: true}\ntraining: {layouts: {2: nodes=2}}", "plan.replan with training.layouts: both would say how many"),
        ("policy: {switching: node}", "policy.switching = node with policy.name = threshold"),
        (
            "policy: {name: colocated, switching: node}\nsplit: {rollout: 1, training: 2}\ntraining: {pp: 2}",
            "a replica of the trainer in layout tp=1,pp=2 has tp 1 x pp 2 x ep 1 = 2 devices",
        ),
        ("policy: {min_rollout_nodes: 3}", "policy.min_rollout_nodes = 3 is more than split.rollout = 2"),
        (
            "cluster: {devices_per_node: 3}\ntraining: {tp: 2}",
            "training.tp = 2 does not divide cluster.devices_per_node = 3",
        ),
        ("training: {pp: 2}", "training.tp 1 x pp 2 = 2 does not divide split.training 1 x cluster.devices_per_node 1 = 1"),
        (
            "cluster: {devices_per_node: 3}\ntraining: {pp: 3}",
            "model: 2 layers do not divide into training.pp = 3 stages",
        ),
        ("cluster: {devices_per_node: 2}\ntraining: {ep: 2}", "training.ep = 2, but the model (model) has no experts"),
        ("model: {experts: 1}", "model.experts_per_token = 2 is more than model.experts = 1"),
        (
            "model: {experts: 6}\ncluster: {devices_per_node: 4}\ntraining: {layouts: {2: ep=4}}",
            "model: 6 experts are not divisible by training.layouts.2: ep = 4",
        ),
        ("training: {layouts: {soon: tp=1}}", "training.layouts.soon: expected the number of an iteration"),
        ("training: {layouts: {3: dp=2}}", "training.layouts.3: 'dp=2' in 'dp=2' is not one of tp=N, pp=N, ep=N, nodes=N"),
        (
            "training: {layouts: {3: \"tp=1,nodes=3\"}}",
            "training.layouts.3: nodes = 3: of split.training 1 + split.rollout 2 nodes at most 2 can train",
        ),
        (
            "training: {layouts: {3: \"pp=4,nodes=2\"}}\nmodel: {layers: 4}",
            "training.layouts.3: tp 1 x pp 4 = 4 does not divide nodes 2 x cluster.devices_per_node 1 = 2 workers",
        ),
        ("training: {layouts: {3: tp=2}}", "training.layouts.3: tp = 2 does not divide cluster.devices_per_node = 1"),
        ("model: {heads: 6}", "model.hidden_size = 128 is not divisible by model.heads = 6"),
        ("model: {kv_heads: 3}", "model.heads = 4 is not divisible by model.kv_heads = 3"),
        ("cluster: {devices_per_node: 8}\ntraining: {tp: 8}", "model.heads = 4 is not divisible by training.tp = 8"),
        (
            "cluster: {devices_per_node: 6}\ntraining: {tp: 6}\n"
            "model: {hidden_size: 120, heads: 12, kv_heads: 4, ffn_size: 240}",
            "model.kv_heads = 4 is neither a multiple nor a divisor of training.tp = 6",
        ),
        (
            "algorithm: {max_prompt_tokens: 300}",
            "300 + algorithm.max_response_tokens 256 = 556 tokens, but model.max_position = 512",
        ),
        (
            "algorithm: {minibatches: 3}",
            "prompts_per_step = 32 groups (of 8 samples, never split) do not divide into algorithm.minibatches = 3 "
            "(10.67 groups each)",
        ),
        ("training: {max_tokens_per_micro_batch: 100}", "does not hold one sample of 64 + 256 = 320 tokens"),
        ("task: {name: aritmetic}", "task.name = aritmetic: known are arithmetic, tools; your own is package.module:Class"),
        ("task: {args: {max_term: 3}}", "task.args of arithmetic: Object contains unknown field `max_term`"),
        ("task: {args: {min_terms: 9, max_terms: 3}}", "task.args of arithmetic: min_terms 9 is greater than max_terms 3"),
        ("task: {args: {tail: .nan}}", "task.args of arithmetic: tail = nan must be a finite number"),
        ("task: {name: tools, args: {kinds: multiplication}}", "task.args of tools: kinds: unknown multiplication"),
        ("task: {train_size: 8}", "algorithm.prompts_per_step = 32 is more than task.train_size = 8"),
        ("training: {lr: .inf}", "training.lr = inf"),
        ("cluster: {time: 1:2:3:4}", "cluster.time: time limit '1:2:3:4' is none of"),
        ("cluster: {time: UNLIMITED}", "no limit"),
        ("cluster: {time: 2}", "cluster.signal_before_s = 120 s leaves nothing of cluster.time = 2 (120 s"),
        ("cluster: {cpus_per_node: 0}", "cluster.cpus_per_node = 0"),
        ("cluster: {sbatch_args: [-N3]}", "'-N3' is set by dynarl from cluster.nodes"),
        ("cluster: {sbatch_args: ['--nodes 3']}", "one item"),
        ("cluster: {sbatch_args: [a100]}", "'a100' is not an option"),
        ("cluster: {srun_args: [--mpi=pmi2]}", "'--mpi=pmi2' is set by dynarl from cluster.mpi"),
        ("cluster: {env: {WANDB_API_KEY: x}}", "cluster.env.WANDB_API_KEY looks like a secret"),
        ("cluster: {env: {'A B': x}}", "'A B' is not the name"),
        ("model: {path: /nowhere}", "cannot read /nowhere/config.json"),
    ],
)
def test_each_fault_shows_its_arithmetic(written, message):
    found = faults(written)
    assert len(found) == 1 and message in found[0], found


def test_the_sizes_of_a_given_model_come_from_its_config_json(tmp_path):
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128, "max_position_embeddings": 300}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert faults(f"model: {{path: '{tmp_path}'}}") == [
        "algorithm.max_prompt_tokens 64 + algorithm.max_response_tokens 256 = 320 tokens, "
        "but model.path.max_position = 300"
    ]
    for name in ("state", "model"):  # what `dynarl import` makes
        (tmp_path / "checkpoint" / name).mkdir(parents=True)
    (tmp_path / "checkpoint" / "model" / "config.json").write_text(json.dumps(shape))
    assert "but model.path.max_position = 300" in faults(f"model: {{path: '{tmp_path}/checkpoint'}}")[0]
    (tmp_path / "config.json").write_text("{}")
    assert "has no 'num_attention_heads'" in faults(f"model: {{path: '{tmp_path}'}}")[0]


@pytest.mark.parametrize("num_nodes", [1, 3, 5])
def test_an_allocation_of_another_size_is_refused(num_nodes):
    config = load.from_text("").config
    with pytest.raises(ConfigError, match=rf"the allocation has {num_nodes} nodes?, .* `sbatch --nodes=4"):
        validate.check_allocation(config, num_nodes)
    validate.check_allocation(config, 4)
