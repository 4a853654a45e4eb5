"""Every setting of a job, with its type, default and meaning. The reference in docs/ is made from this file.

Names follow verl where verl has one, so that a config reads familiar. Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Meta(ge=0.0)]


# Policies under which every node takes every role, one after another; under LENDING ones training and inference nodes
# generate as well, whatever policy.lend_owners says.
TAKING_TURNS = ("colocated", "in_turn")
LENDING = (*TAKING_TURNS, "published")


class Section(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: unknown keys are refused."""


def doc(text: str) -> Meta:
    """Annotate a field with its meaning: `nodes: Annotated[int, doc("...")]`."""
    return Meta(description=text)


class Run(Section):
    """Who this run is and where it keeps its files."""

    name: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"), doc("job name; part of the run's directory")
    ] = "dynarl"
    root: Annotated[
        str | None, doc("directory of all runs, on the shared file system; default $DYNARL_RUNS, else ~/dynarl-runs")
    ] = None
    seed: Annotated[int, doc("seed of prompts, sampling, weights")] = 1
    iterations: Annotated[Count, doc("GRPO iterations, of algorithm.minibatches optimizer steps each")] = 20


class Cluster(Section):
    """What is asked of Slurm, and how a node looks."""

    nodes: Annotated[Positive, doc("nodes of the allocation")] = 4
    devices_per_node: Annotated[Positive, doc("GPUs per node, or worker slots per node with device: cpu")] = 1
    device: Annotated[Literal["cpu", "cuda"], doc("where the models run")] = "cpu"
    cpus_per_node: Annotated[
        int | None, doc("CPUs of a node given to the agent and its workers; default all of the allocation")
    ] = None
    time: Annotated[str, doc("time limit, any of Slurm's forms")] = "1:00:00"
    signal_before_s: Annotated[Positive, doc("how long before the time limit the job saves and requeues itself")] = 120
    partition: Annotated[str | None, doc("partition of the job; default: Slurm's")] = None
    account: Annotated[str | None, doc("account that pays for the job")] = None
    qos: Annotated[str | None, doc("quality of service")] = None
    requeue: Annotated[
        bool,
        doc(
            "ask Slurm to requeue the job at the time limit, or when the controller is lost with its node, and go on "
            "from the checkpoint"
        ),
    ] = True
    max_requeues: Annotated[Count, doc("restarts of one job before it is given up")] = 20
    mpi: Annotated[str, doc("srun --mpi plugin")] = "pmix"
    sbatch_args: Annotated[list[str], doc("further sbatch options, one per item")] = []
    srun_args: Annotated[list[str], doc("further srun options for every component, one per item")] = []
    env: Annotated[dict[str, str], doc("environment of every role worker")] = {}
    modules: Annotated[list[str], doc("modules loaded in the job script")] = []
    prologue: Annotated[list[str], doc("shell lines run in the job script before the controller")] = []
    scratch: Annotated[str | None, doc("node-local directory for sockets; default $TMPDIR, else /tmp")] = None
    staging: Annotated[str, doc("node-local memory file system that holds weights in transit")] = "/dev/shm"
    interface: Annotated[
        str | None, doc("network interface of control and collectives; default: the one that the node name resolves to")
    ] = None


class Split(Section):
    """Home roles: nodes of each component of the heterogeneous step. They must add up to cluster.nodes.

    Training nodes own the optimizer state (training.layouts may change how many they are); all other nodes may change
    role as the policy says.
    """

    rollout: Annotated[Count, doc("nodes that generate")] = 2
    inference: Annotated[Count, doc("nodes that recompute log-probabilities; 0: the training nodes do it in turn")] = 1
    training: Annotated[Positive, doc("nodes that own the optimizer state")] = 1


class Policy(Section):
    """Which nodes change role, and when."""

    name: Annotated[
        Literal["static", "threshold", "adaptive", "colocated", "in_turn", "published"],
        doc(
            "static: nobody moves. threshold: rollout nodes leave as running requests fall. "
            "adaptive: nodes move where a forecast of the iteration's end says that it pays. "
            "colocated: all nodes generate, then share inference and training. To compare with: "
            "in_turn: all nodes generate, then all score, then all train; "
            "published: DynaRL's rule, all generate, then home roles, then changes before a minibatch only"
        ),
    ] = "threshold"
    threshold: Annotated[
        Positive, doc("a rollout node is released when the requests left would fit on the others at this many per node")
    ] = 8
    trigger: Annotated[
        Fraction, doc("of published: share of the requests that are left when nodes return to their home roles")
    ] = 0.2
    shares: Annotated[
        Literal["pulled", "even"],
        doc(
            "groups of a minibatch for each training replica. pulled: the next one when it is free. even: the same number "
            "for each, however long they are"
        ),
    ] = "pulled"
    min_rollout_nodes: Annotated[Positive, doc("rollout nodes that stay until the last request has finished")] = 1
    lend_owners: Annotated[
        bool, doc("training and inference nodes also generate while they have nothing else to do")
    ] = False
    rebalance: Annotated[
        bool, doc("requests move from an overloaded rollout node to an idle one when that pays; no role changes by it")
    ] = True
    equal_nodes: Annotated[
        bool,
        doc(
            "all rollout nodes are taken to be equally fast: for equal hardware, where one that decodes slowly only has "
            "longer requests and is not to get fewer for it"
        ),
    ] = False
    switching: Annotated[
        Literal["job", "node"],
        doc(
            "of colocated. job: roles change together, by a protocol over all that are concerned. node: on each node "
            "the roles take turns at its devices by themselves, as soon as the work there allows"
        ),
    ] = "job"
    dwell_s: Annotated[NonNegative, doc("least time between two moves while answers are generated")] = 0.3
    vote_timeout_s: Annotated[NonNegative, doc("a move not agreed on by then is cancelled")] = 10.0


class Model(Section):
    """The policy model, in Hugging Face form. Without `path` a small one is made from the sizes below."""

    path: Annotated[str | None, doc("directory with config.json and safetensors")] = None
    hidden_size: Annotated[Positive, doc("width of the residual stream")] = 128
    layers: Annotated[Positive, doc("transformer layers")] = 2
    heads: Annotated[Positive, doc("attention heads; must divide hidden_size")] = 4
    kv_heads: Annotated[Positive, doc("key and value heads; must divide heads")] = 2
    ffn_size: Annotated[Positive, doc("width of the feed-forward layer; of each expert, where there are some")] = 256
    experts: Annotated[Count, doc("experts in each layer (Qwen3-MoE); 0: a dense model (Qwen2)")] = 0
    experts_per_token: Annotated[Positive, doc("experts that each token goes to; at most `experts`")] = 2
    max_position: Annotated[Positive, doc("longest sequence, prompt and answer together")] = 512
    tied: Annotated[bool, doc("output layer shares the embedding's weights")] = True
    dtype: Annotated[Literal["float32", "bfloat16"], doc("of weights and activations")] = "float32"


class Task(Section):
    """Prompts and verifier."""

    name: Annotated[str, doc("arithmetic, tools, or package.module:Class for a task of your own (docs/tasks.md)")] = (
        "arithmetic"
    )
    args: Annotated[dict[str, int | float | str | bool | list[int]], doc("arguments of the task")] = {}
    train_size: Annotated[Positive, doc("number of training prompts, drawn at random; an easy task repeats some")] = 100_000
    eval_size: Annotated[Count, doc("held-out prompts")] = 128
    eval_temperature: Annotated[NonNegative, doc("0 is greedy")] = 0.0
    verify_timeout_s: Annotated[NonNegative, doc("a verifier that takes longer is killed; the answer scores 0")] = 5.0
    max_tool_calls: Annotated[Count, doc("tool calls in one answer; one that asks for more is cut")] = 8
    tool_timeout_s: Annotated[NonNegative, doc("a tool that takes longer is killed; the model is told so")] = 10.0
    tool_workers: Annotated[Positive, doc("tool calls that a node runs at a time, for tasks that have tools")] = 1


class Algorithm(Section):
    """GRPO."""

    workflow: Annotated[
        str, doc("what the job consists of: grpo, or agentic where answers call tools (dynarl/hypergraph/workflows)")
    ] = "grpo"
    prompts_per_step: Annotated[Positive, doc("prompts (groups) per iteration")] = 32
    group_size: Annotated[Annotated[int, Meta(ge=2)], doc("samples per prompt")] = 8
    minibatches: Annotated[
        Positive, doc("optimizer steps per iteration; 1: every group counts in one step")
    ] = 1
    membership: Annotated[
        Literal["fixed", "completion"],
        doc(
            "which groups a minibatch has. fixed: by prompt, so it waits for its slowest group. completion: the first "
            "that are complete, so the first minibatches have the short answers and later ones the long"
        ),
    ] = "fixed"
    max_prompt_tokens: Annotated[Positive, doc("longest prompt")] = 64
    max_response_tokens: Annotated[Positive, doc("longest answer; one that reaches it is cut")] = 256
    temperature: Annotated[float, Meta(gt=0.0), doc("of sampling while training")] = 1.0
    clip_ratio_low: Annotated[NonNegative, doc("the probability ratio is clipped at 1 - this")] = 0.2
    clip_ratio_high: Annotated[NonNegative, doc("the probability ratio is clipped at 1 + this")] = 0.28
    kl_loss_coef: Annotated[NonNegative, doc("weight of the k3 KL to the reference; 0: no reference model is kept")] = (
        0.0
    )
    normalize_std: Annotated[bool, doc("divide advantages by the group's standard deviation")] = True
    truncated: Annotated[
        Literal["keep", "zero_reward", "mask"], doc("what becomes of an answer cut at max_response_tokens")
    ] = "zero_reward"


class Dataflow(Section):
    """What flows from one component to the next."""

    chunk: Annotated[
        dict[str, Positive | Literal["all"]],
        doc(
            "by channel of the workflow (trajectories, scored): complete groups that are gathered before they are "
            "offered downstream, where a channel is not named each one at once. all: downstream begins when upstream "
            "has ended. What is left when upstream ends goes as it is"
        ),
    ] = {}


class Plan(Section):
    """What an iteration is expected to take, and what becomes of the split when it takes something else."""

    stage_s: Annotated[
        dict[Literal["rollout", "inference", "training"], NonNegative],
        doc("expected seconds that a component works in an iteration, on its nodes of `split`"),
    ] = {}
    replan: Annotated[
        bool,
        doc(
            "make another split, live and between two iterations, when stages take something else than that for long. "
            "Without stage_s the first `window` iterations are the profile that a plan is made from"
        ),
    ] = False
    tolerance: Annotated[
        float, Meta(gt=0.0), doc("a stage is off its plan when it takes this share more, or less, than expected")
    ] = 0.15
    window: Annotated[Positive, doc("iterations in a row that a stage has to be off")] = 3


class WarmStart(Section):
    """Supervised stage before GRPO, on demonstrations that the task writes. steps 0: none."""

    steps: Annotated[Count, doc("optimizer steps")] = 0
    batch_size: Annotated[Positive, doc("demonstrations per optimizer step")] = 128
    lr: Annotated[NonNegative, doc("learning rate of this stage")] = 3e-3


class Rollout(Section):
    """Generation."""

    engine: Annotated[
        Literal["local", "sglang"],
        doc("local: in the worker, any machine. sglang: a server per device, in an environment of its own"),
    ] = "local"
    max_running: Annotated[Positive, doc("requests that one instance decodes together")] = 32
    max_queued: Annotated[
        Count, doc("requests beyond these that an instance is given; they take the places of answers that are at a tool")
    ] = 0
    order: Annotated[
        Literal["priority", "arrival"],
        doc(
            "which of the requests that wait in an instance goes first. priority: the one with most completed tool "
            "calls, then with the longest cached prefix, then the oldest. arrival: the one that came first"
        ),
    ] = "priority"
    python: Annotated[
        str | None,
        doc(
            "interpreter of the rollout workers; default: with sglang $DYNARL_SGLANG_PYTHON or the one that "
            "bin/install-sglang made in the checkout, else the controller's"
        ),
    ] = None
    args: Annotated[list[str], doc("further arguments of the SGLang server")] = []
    start_timeout_s: Annotated[NonNegative, doc("longest start of an engine")] = 600.0


class Inference(Section):
    """Old (and reference) log-probabilities under the trainer's numerics."""

    max_tokens_per_micro_batch: Annotated[Positive, doc("padded tokens per forward")] = 8192
    python: Annotated[str | None, doc("interpreter of the inference workers; default: the controller's")] = None


class Training(Section):
    """The trainer. Data-parallel size follows: training nodes x devices_per_node / (tp x pp)."""

    tp: Annotated[Positive, doc("tensor-parallel size; must divide devices_per_node")] = 1
    pp: Annotated[Positive, doc("pipeline stages")] = 1
    ep: Annotated[Positive, doc("ranks that the experts of a layer are spread over")] = 1
    layouts: Annotated[
        dict[str, str],
        doc(
            "other layouts, by the iteration that they begin with: `{10: \"tp=1,pp=2\"}`; live, between iterations. "
            "`nodes=N` among them: rollout nodes join the trainer, or leave it, so that it has N nodes"
        ),
    ] = {}
    moved_by: Annotated[
        Literal["mpi", "torch"],
        doc("what carries the state to another layout: MPI by way of host memory, or torch (NCCL on GPUs)"),
    ] = "mpi"
    lr: Annotated[NonNegative, doc("learning rate")] = 1e-3
    lr_warmup_steps: Annotated[Count, doc("optimizer steps over which the rate rises to lr")] = 0
    weight_decay: Annotated[NonNegative, doc("AdamW's")] = 0.0
    adam_beta1: Annotated[Fraction, doc("decay of the gradient's mean")] = 0.9
    adam_beta2: Annotated[Fraction, doc("decay of the squared gradient's mean")] = 0.95
    adam_eps: Annotated[NonNegative, doc("AdamW's epsilon")] = 1e-8
    clip_grad: Annotated[NonNegative, doc("global gradient norm limit; 0: none")] = 1.0
    max_tokens_per_micro_batch: Annotated[Positive, doc("padded tokens per forward and backward")] = 8192
    python: Annotated[str | None, doc("interpreter of the training workers; default: the controller's")] = None


class Checkpoint(Section):
    """What is saved, besides at the end of the run and when it is interrupted."""

    every: Annotated[Count, doc("iterations between checkpoints; 0: only at the end")] = 0
    keep: Annotated[Positive, doc("newest complete checkpoints that are kept")] = 2


class Failure(Section):
    """What happens when a worker dies or hangs."""

    rollout: Annotated[Literal["restart", "end"], doc("start the worker again, or end the job")] = "restart"
    inference: Annotated[Literal["restart", "end"], doc("as for rollout")] = "restart"
    training: Annotated[
        Literal["restart", "end"], doc("as for rollout; a trainer that owned state goes back to the newest checkpoint")
    ] = "restart"
    environment: Annotated[Literal["restart", "end"], doc("as for rollout")] = "restart"
    max_restarts: Annotated[
        Count,
        doc("restarts of all workers together before the job ends; counted anew after 5 iterations without one"),
    ] = 8
    collective_s: Annotated[
        float,
        Meta(gt=0.0),
        doc("a worker that keeps its group waiting for so long in a collective is lost; no micro-batch takes so long"),
    ] = 180.0
    hang_s: Annotated[
        dict[Literal["rollout", "inference", "training", "environment"], NonNegative],
        doc(
            "by role: a worker that answers nobody, or gets nothing of its work done, for so long is ended and counts "
            "as dead; a role that is not named is not watched"
        ),
    ] = msgspec.field(
        default_factory=lambda: {"rollout": 120.0, "inference": 300.0, "training": 300.0, "environment": 60.0}
    )
    give_back_s: Annotated[
        NonNegative, doc("a worker that has not handed back its work by then, when its node changes role, is ended")
    ] = 60.0
    no_progress_s: Annotated[NonNegative, doc("the job ends when nothing has moved for so long")] = 600.0


class Config(Section):
    """A whole job."""

    run: Run = msgspec.field(default_factory=Run)
    cluster: Cluster = msgspec.field(default_factory=Cluster)
    split: Split = msgspec.field(default_factory=Split)
    policy: Policy = msgspec.field(default_factory=Policy)
    model: Model = msgspec.field(default_factory=Model)
    task: Task = msgspec.field(default_factory=Task)
    algorithm: Algorithm = msgspec.field(default_factory=Algorithm)
    dataflow: Dataflow = msgspec.field(default_factory=Dataflow)
    plan: Plan = msgspec.field(default_factory=Plan)
    warm_start: WarmStart = msgspec.field(default_factory=WarmStart)
    rollout: Rollout = msgspec.field(default_factory=Rollout)
    inference: Inference = msgspec.field(default_factory=Inference)
    training: Training = msgspec.field(default_factory=Training)
    checkpoint: Checkpoint = msgspec.field(default_factory=Checkpoint)
    failure: Failure = msgspec.field(default_factory=Failure)
