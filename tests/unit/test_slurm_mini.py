"""The pure parts of minislurm: shapes, paths, configuration, addresses, cgroup files."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynarl.slurm.mini import MiniSlurmError, cgroup, cli, conf, net, preflight, processes, spec
from dynarl.slurm.mini.cgroup import Cgroup
from dynarl.slurm.mini.net import Subnet
from dynarl.slurm.mini.record import Record, load, save
from dynarl.slurm.mini.spec import ClusterSpec, Paths


@pytest.mark.parametrize("module", [spec, conf, net, cgroup])
def test_examples_in_the_text_hold(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"nodes": 0}, "--nodes 0"),
        ({"nodes": 201}, "--nodes 201"),
        ({"nodes": 1, "cpu_quota": 0.01}, "--cpu-quota 0.01"),
        ({"nodes": 1, "gpus_per_node": -1}, "--gpus-per-node -1"),
        ({"nodes": 1, "name": "My Cluster"}, "'My Cluster'"),
    ],
)
def test_a_wrong_shape_quotes_the_option_and_its_value(wrong, text):
    with pytest.raises(MiniSlurmError, match=text):
        ClusterSpec(**wrong)


def test_a_state_directory_leaves_room_for_the_longest_socket(tmp_path):
    room = "/" + "x" * (spec.MAX_STATE_DIR_BYTES - 1)
    longest = Paths.of(room).spool / "stepd.slurm.pmix.67043327.40000"  # Slurm's highest job and step
    assert len(str(longest)) <= 107
    with pytest.raises(MiniSlurmError, match="too long"):
        Paths.of(room + "x")


def test_a_state_directory_that_slurm_conf_cannot_hold_is_refused():
    with pytest.raises(MiniSlurmError, match="my dir"):
        Paths.of("/srv/my dir")


def test_each_version_gets_only_keys_it_knows():
    assert conf.cgroup_conf(conf.parse_version("slurm-wlm 22.05.8")) == "CgroupPlugin=cgroup/v1\n"
    assert conf.cgroup_conf(conf.parse_version("slurm 24.11.5")) == "CgroupPlugin=disabled\n"
    with pytest.raises(MiniSlurmError, match="21.08 is too old"):
        conf.parse_version("slurm-wlm 21.08.5")
    with pytest.raises(MiniSlurmError, match="'nonsense'"):
        conf.parse_version("nonsense")


def test_slurm_conf_names_every_node_with_its_address_and_shape():
    shape = ClusterSpec(nodes=2, gpus_per_node=4, cpus_per_node=3, slurmd_timeout_s=7)
    text = conf.slurm_conf(shape, Paths(Path("/s")), Subnet(5), memory_mb=1000)
    settings = [line for line in text.splitlines() if "=" in line and not line.startswith(("#", "NodeName"))]
    keys = dict(line.split("=", 1) for line in settings)
    assert keys["SlurmdTimeout"] == "7"
    assert keys["AuthInfo"] == "socket=/s/local/munge/socket,cred_expire=10"
    nodes = [line for line in text.splitlines() if line.startswith("NodeName=")]
    assert [line.split()[:2] for line in nodes] == [
        ["NodeName=n1", "NodeAddr=198.18.5.11"],
        ["NodeName=n2", "NodeAddr=198.18.5.12"],
    ]
    assert all("CPUs=3 " in line and line.endswith("RealMemory=1000 Gres=gpu:4") for line in nodes)
    assert conf.gres_conf(shape, Paths(Path("/s"))).endswith("Name=gpu File=/s/local/dev/nvidia[0-3]\n")


def test_hosts_name_the_login_node_unless_a_node_has_that_name():
    shape = ClusterSpec(nodes=2)
    assert "198.18.0.2 vm\n" in conf.hosts(shape, Subnet(0), "vm")
    assert "198.18.0.2" not in conf.hosts(shape, Subnet(0), "n2")


def test_every_subnet_has_a_link_of_its_own_that_the_kernel_takes():
    links = [Subnet(i).link for i in range(512)]
    assert len(set(links)) == 512
    assert max(map(len, links)) <= 15
    assert all(Subnet(i).network.subnet_of(net.POOL) for i in range(512))
    assert Subnet(0).network[11 + spec.MAX_NODES - 1] != Subnet(0).network.broadcast_address


def test_a_record_is_read_back_as_it_was_written(tmp_path):
    record = Record("ab12", "up", "boot", ClusterSpec(nodes=2, cpu_quota=0.5, shares=("/tmp/a",)), 7)
    record.inits = {"head": processes.Process(10, 20), "n1": None}
    save(Paths(tmp_path), record)
    assert load(Paths(tmp_path)) == record
    assert load(Paths(tmp_path / "nothing")) is None


def test_only_directories_under_private_places_are_shared_and_the_outermost_ones(monkeypatch, tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setattr(sys, "prefix", "/usr")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr(cli.dynarl, "__file__", "/opt/dynarl/dynarl/__init__.py")
    monkeypatch.setattr(cli, "PRIVATE", (str(tmp_path), "/dev/shm"))
    assert cli.shares(Paths(Path("/var/state")), [str(inner), str(inner.parent), "/usr"]) == (str(inner.parent),)
    with pytest.raises(MiniSlurmError, match="private to each node"):
        cli.shares(Paths(Path("/var/state")), [str(tmp_path)])
    with pytest.raises(MiniSlurmError, match="no such directory"):
        cli.shares(Paths(Path("/var/state")), [str(tmp_path / "c")])


def test_the_cpu_hierarchy_is_found_in_either_version(tmp_path):
    v1 = "25 30 0:22 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct"
    memory = "26 30 0:23 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
    v2 = f"27 30 0:24 / {tmp_path} rw - cgroup2 cgroup2 rw,nsdelegate"
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io\n")
    assert cgroup.find_hierarchy(f"{memory}\n{v1}\n{v2}") == (Path("/sys/fs/cgroup/cpu"), 1)
    assert cgroup.find_hierarchy(f"{memory}\n{v2}") == (tmp_path, 2)
    (tmp_path / "cgroup.controllers").write_text("hugetlb\n")  # cpu is bound to a v1 hierarchy that is not mounted here
    assert cgroup.find_hierarchy(f"{memory}\n{v2}") is None


def test_a_quota_is_written_as_each_version_wants_it(tmp_path):
    for version in (1, 2):
        top = tmp_path / str(version)
        top.mkdir()
        (top / "cgroup.subtree_control").write_text("cpu")
        groups = Cgroup(top, version, "ab12")
        groups.prepare(quotas=False)
        groups.host("n1").mkdir()
        (groups.host("n1") / "cgroup.type").write_text("domain")
        groups.create("n1", 0.25)
    assert (tmp_path / "1/minislurm-ab12/n1/cpu.cfs_quota_us").read_text() == "5000"
    assert (tmp_path / "1/minislurm-ab12/n1/cpu.cfs_period_us").read_text() == "20000"
    assert (tmp_path / "2/minislurm-ab12/n1/cpu.max").read_text() == "5000 20000"


def test_groups_below_a_populated_top_become_threaded(tmp_path):
    groups = Cgroup(tmp_path, 2, "ab12")
    groups.prepare(quotas=False)
    groups.host("n1").mkdir()
    (groups.host("n1") / "cgroup.type").write_text("domain invalid\n")
    groups.create("n1", 1.5)
    assert (groups.host("n1") / "cgroup.type").read_text() == "threaded"
    (groups.host("n1") / "cgroup.threads").write_text("12\n13\n")
    assert groups.pids("n1") == {12, 13}


def test_the_package_that_slurms_pmix_plugin_lacks_is_named(tmp_path):
    assert preflight.missing_pmix_packages([]) == []
    assert preflight.missing_pmix_packages([str(tmp_path)]) == ["slurm-wlm-basic-plugins"]
    (tmp_path / "mpi_pmix_v9.so").write_bytes(b"\0libpmix_plug\0libpmix.so.999\0")
    assert preflight.missing_pmix_packages([str(tmp_path)]) == ["libpmix2"]
    (tmp_path / "mpi_pmix_v9.so").write_bytes(b"\0_libpmix_open\0libc.so.6\0")
    assert preflight.missing_pmix_packages([str(tmp_path)]) == []


def test_a_process_is_not_mistaken_for_a_later_one_with_its_pid():
    me = processes.Process.of(os.getpid())
    assert me.alive()
    assert not processes.Process(me.pid, me.start + 1).alive()
    with subprocess.Popen(["sleep", "100"]) as child:
        gone = processes.Process.of(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not gone.alive()  # a zombie runs nothing
    with pytest.raises(ProcessLookupError):
        processes.Process.of(child.pid)


def test_only_what_is_named_twice_is_killed():
    with subprocess.Popen(["sleep", "100"]) as victim, subprocess.Popen(["sleep", "100"]) as spared:
        answers = iter([{victim.pid, spared.pid}, {victim.pid}, set()])
        assert processes.kill_all(lambda: next(answers)) == set()
        assert victim.wait(timeout=60) == -9
        assert spared.poll() is None
        spared.kill()


def test_what_does_not_die_is_reported():
    with subprocess.Popen(["sleep", "100"]) as stubborn:
        assert processes.kill_all(lambda: {stubborn.pid}, timeout_s=0) == {stubborn.pid}
        stubborn.kill()


def test_a_process_without_our_mounts_is_nobodys():
    assert processes.members({"minislurm-ab12-n1"}) == {}


def test_it_needs_nothing_but_the_standard_library():
    checkout = str(Path(cli.dynarl.__file__).parents[1])
    code = "import dynarl.slurm.mini.cli, dynarl.slurm.mini.node, dynarl.slurm.mini.handle"
    # -S: no installed package can be found. -I ignores PYTHONPATH, so the path is set by hand.
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {checkout!r}); {code}"]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""
