import pytest

from dynarl.config import load
from dynarl.config.schema import Config
from dynarl.errors import ConfigError


@pytest.fixture(autouse=True)
def no_site(monkeypatch, tmp_path):
    monkeypatch.setattr(load, "SITE_CLUSTERS", tmp_path / "clusters.d")
    monkeypatch.delenv("DYNARL_CLUSTER", raising=False)
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def test_an_empty_file_gives_the_defaults(tmp_path):
    assert load.load(write(tmp_path / "a.yaml", "")) == Config()
    assert load.load(write(tmp_path / "b.yaml", "# only\nrun:\n  # comments\n")) == Config()


def test_dump_reads_back_to_the_same(tmp_path):
    config = load.from_text(
        "run: {name: x, root: 'null'}\ntraining: {lr: 3e-07, adam_eps: 1e-12}\n"
        "cluster: {time: 2-3, env: {A: '1', B: 'on', C: ''}}\ntask: {args: {a: [1, 2], b: true}}\n"
    ).config
    assert load.from_text(load.dump(config)).config == config


@pytest.mark.parametrize(
    "written, path, value",
    [
        ("training: {lr: 1e-3}", "training.lr", 1e-3),
        ("training: {lr: 1}", "training.lr", 1.0),
        ("cluster: {time: 1:00:00}", "cluster.time", "1:00:00"),
        ("cluster: {time: 30}", "cluster.time", "30"),
        ("cluster: {partition: on}", "cluster.partition", "on"),
        ("cluster: {partition: null}", "cluster.partition", None),
        ("cluster: {env: {OMP_NUM_THREADS: 1, B: true}}", "cluster.env", {"OMP_NUM_THREADS": "1", "B": "true"}),
        ("cluster: {sbatch_args: [-x, 3]}", "cluster.sbatch_args", ["-x", "3"]),
        ("task: {args: {n: 3, s: 'x'}}", "task.args", {"n": 3, "s": "x"}),
        ("cluster: {requeue: false}", "cluster.requeue", False),
        ("run: {seed: 1_000}", "run.seed", 1000),
    ],
)
def test_values_are_read_without_the_surprises_of_yaml(written, path, value):
    config = load.from_text(written).config
    section, key = path.split(".")
    found = getattr(getattr(config, section), key)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "written, message",
    [
        ("cluster: {nods: 4}", "job:1: unknown key cluster.nods; did you mean cluster.nodes?"),
        ("clutser: {nodes: 4}", "job:1: unknown key clutser; did you mean cluster?"),
        ("model: {tp: 2}", "job:1: unknown key model.tp; there is training.tp"),
        ("\ncluster:\n  nodes: four", "job:3: cluster.nodes: expected int, got 'four'"),
        ("cluster: {nodes: 0}", "job:1: cluster.nodes: expected int >= 1, got 0"),
        ("cluster: {nodes: 2.5}", "job:1: cluster.nodes: expected int, got 2.5"),
        ("cluster: {nodes: null}", "job:1: cluster.nodes: expected int, got null"),
        ("cluster: {requeue: yes}", "job:1: cluster.requeue: expected bool, got 'yes'"),
        ("policy: {name: stat}", "job:1: policy.name: expected one of static, threshold, adaptive, colocated, in_turn, published, got 'stat'"),
        ("policy: {threshold: 0}", "job:1: policy.threshold: expected int >= 1, got 0"),
        ("policy: static", "job:1: policy is a section with keys of its own, got 'static'"),
        ("run: {name: '../x'}", "job:1: run.name: expected str matching regex"),
        ("[1, 2]", "job: expected sections such as"),
        ("cluster:\n  nodes: 4\n  nodes: 5", "job:3: key 'nodes' is given twice"),
        ("cluster: {nodes: 4", "job:1: not YAML"),
        ("a: &x [*x]", "nested without end"),
        ("cluster:\n  <<: {nodes: 1}", "merge keys"),
    ],
)
def test_faults_name_the_line_the_path_and_the_value(written, message):
    with pytest.raises(ConfigError) as error:
        load.from_text(written)
    assert message in str(error.value)


def test_all_faults_are_reported_at_once():
    with pytest.raises(ConfigError) as error:
        load.from_text("cluster: {nods: 4, time: []}\nrun: {seed: x}")
    assert len(str(error.value).splitlines()) == 3


def test_later_layers_win_and_every_value_knows_its_origin(tmp_path, monkeypatch):
    site = write(tmp_path / "site.yaml", "cluster:\n  partition: gpu\n  mpi: pmix_v4\n  env: {A: 1}\n")
    job = write(tmp_path / "job.yaml", "cluster:\n  env: {B: 2}\n  mpi: pmix\n")
    monkeypatch.setenv("DYNARL_CLUSTER", str(site))
    loaded = load.load_layers(job, ["cluster.account=me", "cluster.mpi=pmi2", "training.lr=1e-4"])
    cluster = loaded.config.cluster
    assert (cluster.partition, cluster.mpi, cluster.account, cluster.env) == ("gpu", "pmi2", "me", {"B": "2"})
    assert loaded.config.training.lr == 1e-4
    assert loaded.origins["cluster.partition"] == f"{site}:2"
    assert loaded.origins["cluster.env"] == f"{job}:2"
    assert loaded.origins["cluster.mpi"] == "--set cluster.mpi"
    assert loaded.origins["cluster.qos"] == "built-in"


@pytest.mark.parametrize(
    "option, message",
    [
        ("cluster.nodes", "expected SECTION.KEY=VALUE"),
        ("nodes=3", "expected SECTION.KEY=VALUE"),
        ("cluster.node=3", "unknown key cluster.node; did you mean cluster.nodes?"),
        ("cluster.nodes=x", "--set cluster.nodes: cluster.nodes: expected int, got 'x'"),
        ("cluster.env=[", "not YAML"),
    ],
)
def test_faults_in_set_options(option, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        load.load_layers(None, [option])


def test_set_reaches_free_form_tables():
    assert load.load_layers(None, ["task.args={a: 1}"]).config.task.args == {"a": 1}


def test_the_cluster_file_is_found_by_name_or_is_the_only_one(tmp_path, monkeypatch):
    assert load.cluster_file() is None
    one = write(load.SITE_CLUSTERS / "one.yaml", "")
    assert load.cluster_file() == one
    two = write(load.SITE_CLUSTERS / "two.yaml", "")
    with pytest.raises(ConfigError, match="Set DYNARL_CLUSTER.*one, two"):
        load.cluster_file()
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "two")
    assert load.cluster_file() == two
    monkeypatch.setenv("DYNARL_CLUSTER", "one")
    assert load.cluster_file() == one
    monkeypatch.setenv("DYNARL_CLUSTER", "three")
    with pytest.raises(ConfigError, match="DYNARL_CLUSTER=three.*one, two"):
        load.cluster_file()


def test_a_missing_or_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no configuration file .*nothing.yaml"):
        load.load(tmp_path / "nothing.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read .*b.yaml"):
        load.load(tmp_path / "b.yaml")
