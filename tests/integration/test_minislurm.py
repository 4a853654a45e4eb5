"""minislurm on this machine: what it gives, and that it leaves nothing behind whatever happens to it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dynarl.slurm.mini import cgroup as cgroups
from dynarl.slurm.mini import net, processes, record
from dynarl.slurm.mini.handle import MiniSlurm
from dynarl.slurm.mini.net import Subnet
from dynarl.slurm.mini.spec import Paths

MINISLURM = str(Path(__file__).resolve().parents[2] / "bin" / "minislurm")


@pytest.fixture
def state_dir(minislurm):
    """A place for a cluster of the test's own, which is taken down after it (the fixture `minislurm` skips where none
    can be). Not under tmp_path, which is too long for the sockets of Slurm."""
    directory = Path(tempfile.mkdtemp(prefix="minislurm-"))
    yield directory
    call("down", "--state-dir", directory)
    shutil.rmtree(directory)


def call(*arguments, check=True, **options) -> subprocess.CompletedProcess:
    done = subprocess.run([MINISLURM, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def traces(cluster: record.Record) -> list[str]:
    """Everything outside of the state directory that there is of this cluster."""
    found = [f"process {pid} of {owner}" for pid, owner in processes.members(cluster.labels).items()]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if cluster.id in line:
            found.append(f"mount {line}")
    groups = cgroups.for_cluster(cluster.id)
    found += [str(group) for group in (groups.base.rglob("*") if groups else ())]
    found += [str(groups.base)] if groups and groups.base.exists() else []
    links = json.loads(subprocess.run(["ip", "-j", "link"], capture_output=True, text=True, check=True).stdout)
    # The link is one end of a pair: while it is there, so is the network namespace that holds the other end and the
    # bridge. It may have no alias yet; with another one it is the next cluster's, which took the subnet over.
    name = Subnet(cluster.subnet).link if cluster.subnet >= 0 else None
    ours = (None, f"minislurm-{cluster.id}")
    found += [f"link {name}" for link in links if link["ifname"] == name and link.get("ifalias") in ours]
    return found


# Nothing is left


def test_down_leaves_nothing(state_dir):
    handle = MiniSlurm.start(state_dir, nodes=2, gpus_per_node=2, cpu_quota=0.5)
    cluster = record.load(handle.paths)
    before = traces(cluster)
    for kind in ("process", "link", "/sys/fs/cgroup"):
        assert any(trace.startswith(kind) for trace in before), f"no {kind} in {before}"
    # A process that leaves the job's process tree, its session and the node's mounts is found all the same.
    handle.run_on("n1", ["bash", "-c", "setsid sleep 1000 </dev/null >/dev/null 2>&1 &"])
    handle.run_on("n1", ["bash", "-c", "nsenter --mount=/proc/1/ns/mnt setsid sleep 1000 </dev/null >/dev/null 2>&1 &"])
    handle.submit("--nodes=2", "--wrap=srun sleep 1000", "-o", "/dev/null")
    handle.down()
    assert traces(cluster) == []
    assert sorted(os.listdir(state_dir)) == ["log", "minislurm.lock"]


@pytest.mark.parametrize("after_s", [0.1, 0.2, 0.3, 0.5, 0.8])
def test_down_cleans_up_after_an_up_that_was_killed(state_dir, after_s):
    command = [MINISLURM, "up", "--nodes", "4", "--cpu-quota", "0.2", "--state-dir", state_dir]
    with subprocess.Popen(command) as starting:
        time.sleep(after_s)
        starting.kill()
    cluster = record.load(Paths.of(state_dir))
    call("down", "--state-dir", state_dir)
    assert cluster is None or traces(cluster) == []
    assert record.load(Paths.of(state_dir)) is None


def test_up_that_is_interrupted_takes_back_what_it_began(state_dir):
    for number in (signal.SIGINT, signal.SIGTERM):
        command = [MINISLURM, "up", "--nodes", "4", "--cpu-quota", "0.05", "--state-dir", state_dir]
        # Where this suite runs in the background of a shell, Ctrl-C is ignored, and children inherit that.
        with subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as starting:
            deadline = time.monotonic() + 120
            while (cluster := record.load(Paths.of(state_dir))) is None or not cluster.inits.get("n1"):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            starting.send_signal(number)
        assert starting.returncode == 128 + number
        assert traces(cluster) == []
        assert record.load(Paths.of(state_dir)) is None


def test_down_works_when_parts_are_gone_already(state_dir):
    handle = MiniSlurm.start(state_dir, nodes=2)
    cluster = record.load(handle.paths)
    subprocess.run(["ip", "link", "del", Subnet(cluster.subnet).link], check=True)
    os.kill(cluster.inits["n1"].pid, signal.SIGKILL)
    os.kill(cluster.inits["head"].pid, signal.SIGKILL)
    assert handle.status()["state"] == "broken"
    handle.down()
    assert traces(cluster) == []


def test_down_finds_a_cluster_whose_record_was_deleted(state_dir):
    handle = MiniSlurm.start(state_dir, nodes=2)
    cluster = record.load(handle.paths)
    handle.paths.record.unlink()
    handle.down()
    assert traces(cluster) == []


def test_up_replaces_a_cluster_that_died(state_dir):
    handle = MiniSlurm.start(state_dir, nodes=1)
    dead = record.load(handle.paths)
    os.kill(dead.inits["head"].pid, signal.SIGKILL)
    handle = MiniSlurm.start(state_dir, nodes=1)
    assert handle.run(["srun", "hostname"]).stdout == "n1\n"
    assert traces(dead) == []


def test_down_kills_no_stranger_that_got_a_recorded_pid(state_dir):
    handle = MiniSlurm.start(state_dir, nodes=1)
    cluster = record.load(handle.paths)
    with subprocess.Popen(["sleep", "1000"]) as stranger:
        cluster.inits["n1"] = processes.Process(stranger.pid, cluster.inits["n1"].start)
        record.save(handle.paths, cluster)
        handle.down()
        assert traces(cluster) == []
        assert stranger.poll() is None
        stranger.kill()


def test_down_refuses_to_stop_the_cluster_it_runs_in(minislurm):
    handle = minislurm(nodes=2)
    done = handle.run_on("n1", [MINISLURM, "down", "--state-dir", str(handle.paths.root)], check=False)
    assert done.returncode == 1
    assert "inside the cluster" in done.stderr
    assert handle.status()["state"] == "up"


# Several, again, wrong


def test_a_subnet_that_is_taken_is_left_alone(state_dir):
    taken = next(net.candidates(str(state_dir)))
    subprocess.run(["ip", "link", "add", taken.link, "type", "bridge"], check=True)
    try:
        with MiniSlurm.start(state_dir, nodes=1) as handle:
            assert handle.status()["link"] != taken.link
            assert handle.run(["srun", "hostname"]).stdout == "n1\n"
    finally:
        subprocess.run(["ip", "link", "del", taken.link], check=True)


def test_two_clusters_are_up_at_once(minislurm, state_dir):
    first = minislurm(nodes=2)
    with MiniSlurm.start(state_dir, nodes=3) as second:
        assert first.run(["sinfo", "-h", "-o", "%D %T"]).stdout.split() == ["2", "idle"]
        assert sorted(second.run(["srun", "-N3", "hostname"]).stdout.split()) == ["n1", "n2", "n3"]
        assert first.status()["network"] != second.status()["network"]
    assert first.run(["srun", "-N2", "true"]).returncode == 0


def test_up_again_leaves_the_same_cluster_as_it_is_and_refuses_another_shape(minislurm):
    handle = minislurm(nodes=2)
    before = handle.status()
    same = call("up", "--nodes", 2, "--cpus-per-node", 4, "--state-dir", handle.paths.root)
    assert "already up" in same.stdout
    other = call("up", "--nodes", 3, "--cpus-per-node", 4, "--state-dir", handle.paths.root, check=False)
    assert other.returncode == 1
    assert "nodes: 2 here, 3 asked for" in other.stderr
    assert "cpus" not in other.stderr
    assert handle.status()["id"] == before["id"]


def test_a_directory_with_other_files_is_refused(minislurm, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    done = call("up", "--nodes", 1, "--state-dir", tmp_path, check=False)
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_without_root_it_says_so(state_dir):
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    # A copy that others can read: a checkout below /root they cannot.
    with tempfile.TemporaryDirectory(prefix="minislurm-") as readable:
        shutil.copytree(Path(MINISLURM).parents[1] / "dynarl", Path(readable) / "dynarl")
        os.chmod(readable, 0o755)
        done = subprocess.run(
            [*nobody, "/usr/bin/python3", "-P", "-m", "dynarl.slurm.mini", "up", "--nodes", "1", "--state-dir", state_dir],
            capture_output=True, text=True, cwd=readable, env={"PYTHONPATH": readable},
        )  # fmt: skip
    assert done.returncode == 1
    assert "root is needed" in done.stderr


def test_without_the_right_to_namespaces_it_says_what_a_container_needs(state_dir):
    bare = ["setpriv", "--bounding-set=-sys_admin", MINISLURM]
    done = subprocess.run([*bare, "up", "--nodes", "1", "--state-dir", state_dir], capture_output=True, text=True)
    assert done.returncode == 1
    assert "--cap-add SYS_ADMIN" in done.stderr


# What the nodes are


def test_nodes_share_files_but_not_tmp_and_shm(minislurm, tmp_path):
    handle = minislurm(nodes=2)
    script = f"""
        hostname > /tmp/mine; hostname > /dev/shm/mine; hostname > {tmp_path}/$(hostname)
        until [ -s {tmp_path}/n1 ] && [ -s {tmp_path}/n2 ]; do sleep 0.1; done
        echo $(hostname) $(cat /tmp/mine) $(cat /dev/shm/mine) $(ls {tmp_path})
    """
    lines = handle.run(["srun", "-N2", "bash", "-c", script], cwd=tmp_path).stdout.splitlines()
    assert sorted(lines) == ["n1 n1 n1 n1 n2", "n2 n2 n2 n1 n2"]
    assert not Path("/tmp/mine").exists() and not Path("/dev/shm/mine").exists()


def test_names_resolve_on_every_node_and_lead_there(minislurm):
    handle = minislurm(nodes=2)
    names = "import socket; print(*(socket.gethostbyname(n) for n in ('n1', 'n2', 'head')), socket.gethostname())"
    seen = handle.run(["srun", "-N2", sys.executable, "-c", names]).stdout.splitlines()
    addresses = " ".join([node["address"] for node in handle.status()["nodes"]])
    assert sorted(line.rsplit(" ", 1)[1] for line in seen) == ["n1", "n2"]
    assert all(line.startswith(addresses) for line in seen)
    serve = (
        "import socket; server = socket.create_server(('', 7000)); open('/tmp/listens', 'w');"
        "connection, _ = server.accept(); connection.sendall(b'n2 here')"
    )
    until = "until [ -e /tmp/listens ]; do sleep 0.1; done"
    handle.run_on("n2", ["bash", "-c", f'{sys.executable} -c "{serve}" >/dev/null 2>&1 & {until}'])
    talk = "import socket; print(socket.create_connection(('n2', 7000)).recv(100))"
    assert "n2 here" in handle.run_on("n1", [sys.executable, "-c", talk]).stdout


def test_gpus_are_handed_out_by_slurm(minislurm):
    handle = minislurm(nodes=2, gpus=2)
    script = "echo $(hostname) $CUDA_VISIBLE_DEVICES"
    seen = handle.run(["srun", "-N2", "--gpus-per-node=2", "bash", "-c", script]).stdout
    assert sorted(seen.splitlines()) == ["n1 0,1", "n2 0,1"]
    one = handle.run(["srun", "-N1", "--gpus-per-node=1", "bash", "-c", "echo $CUDA_VISIBLE_DEVICES"]).stdout
    assert one == "0\n"


@pytest.mark.parametrize("quota", [0.25, 0.5])
def test_a_quota_is_the_compute_of_a_node_however_many_processes_it_runs(minislurm, tmp_path, quota):
    handle = minislurm(nodes=2, quota=quota)
    # All measure the same seconds, from shortly after the last of them is there, so that the sum is that of the node.
    seconds = 4
    burn = f"""
import os, pathlib, time
here = pathlib.Path({str(tmp_path)!r})
(here / os.environ["SLURM_PROCID"]).touch()
while len(there := list(here.iterdir())) < 3: time.sleep(0.05)
begin = max(path.stat().st_mtime for path in there) + 1
while time.time() < begin: pass
before = time.process_time()
while time.time() < begin + {seconds}: pass
print((time.process_time() - before) / {seconds})
"""
    seen = handle.run(["srun", "-N1", "-n3", "-w", "n1", sys.executable, "-c", burn]).stdout.split()
    cores = sum(map(float, seen))
    print(f"quota {quota}: measured {cores:.3f} cores")
    assert len(seen) == 3
    assert cores <= quota * 1.1
    # How much of it the node really gets depends on who else is on this machine; the limit does not.
    assert cores >= quota * 0.3


def test_a_batch_script_is_outside_its_nodes_quota_and_its_steps_inside(minislurm, tmp_path):
    handle = minislurm(nodes=1, quota=0.25)
    output = tmp_path / "out"
    own = "grep -o minislurm-.* /proc/self/cgroup"
    handle.run(["sbatch", "--wait", f"--output={output}", f"--wrap={own}; srun -n1 {own}"])
    batch, step = output.read_text().split()
    assert (Path(batch).name, Path(step).name) == ("batch", "n1")


def test_a_heterogeneous_step_is_one_mpi_world(minislurm, tmp_path):
    pytest.importorskip("mpi4py")
    handle = minislurm(nodes=3)
    (tmp_path / "hello.py").write_text(
        "import os, time\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\nrank = world.rank\n"
        "where = os.environ['ROLE'], os.uname().nodename\n"
        "print(rank, world.size, *where, world.allreduce(rank), flush=True)\n"
        "MPI.Finalize()\ntime.sleep(0.2 * rank)\n"  # components that end at the same moment may keep srun for ever
    )
    part = "--mpi=pmix --export=ALL,ROLE={role} -N1 -n1 -w {node} {python} {program}"
    parts = [
        part.format(role=role, node=node, python=sys.executable, program=tmp_path / "hello.py")
        for role, node in (("rollout", "n1"), ("inference", "n2"), ("training", "n3"))
    ]
    # Very rarely a rank crashes as it connects to the others (seen with Open MPI 4.1 on a machine under heavy load).
    srun = "srun " + " : ".join(parts)
    step = tmp_path / "step"
    (tmp_path / "job.sh").write_text(
        f"#!/bin/sh\nfor attempt in 1 2 3; do timeout -k 5 45 {srun} >{step} && exec cat {step}; done\nexit 1\n")
    job = handle.submit("-N3", "--exclusive", "-o", str(tmp_path / "out"), str(tmp_path / "job.sh"))
    assert handle.wait_job(job) == "COMPLETED", (tmp_path / "out").read_text()
    lines = sorted((tmp_path / "out").read_text().splitlines())
    assert lines == ["0 3 rollout n1 3", "1 3 inference n2 3", "2 3 training n3 3"]


def test_slurm_works_on_a_node_without_the_submitters_environment(minislurm, tmp_path):
    handle = minislurm(nodes=2)
    job = handle.submit("-N2", "--export=NONE", "-o", str(tmp_path / "out"), "--wrap=srun -N2 /bin/hostname")
    assert handle.wait_job(job) == "COMPLETED", (tmp_path / "out").read_text()
    assert sorted((tmp_path / "out").read_text().split()) == ["n1", "n2"]


# Jobs that end badly


def test_scancel_from_the_machine_leaves_no_process_of_the_job(minislurm, tmp_path):
    handle = minislurm(nodes=2)
    job = handle.submit("-N2", "-o", str(tmp_path / "out"), "--wrap=srun sh -c 'echo up; sleep 1000'")
    wait_for(lambda: (tmp_path / "out").exists() and (tmp_path / "out").read_text().count("up") == 2)
    assert handle.job_processes("n1") and handle.job_processes("n2")
    handle.run(["scancel", job])
    assert handle.wait_job(job) == "CANCELLED"
    wait_for(lambda: not handle.job_processes())


def test_a_requeued_job_starts_again_within_seconds(minislurm, tmp_path):
    handle = minislurm(nodes=2)
    script = "--wrap=echo run ${SLURM_RESTART_COUNT:-0}; [ -n \"$SLURM_RESTART_COUNT\" ] || sleep 1000"
    job = handle.submit("-N2", "--requeue", "--open-mode=append", "-o", str(tmp_path / "out"), script)
    wait_for(lambda: (tmp_path / "out").exists() and "run 0" in (tmp_path / "out").read_text())
    began = time.monotonic()
    handle.run(["scontrol", "requeue", job])
    assert handle.wait_job(job, states={"COMPLETED"}) == "COMPLETED"
    assert "run 1" in (tmp_path / "out").read_text()
    assert time.monotonic() - began < 110  # two minutes with Slurm's default


@pytest.mark.slow
def test_a_time_limit_warns_the_batch_script_and_then_ends_the_job(minislurm, tmp_path):
    handle = minislurm(nodes=2)
    script = "--wrap=trap 'echo warned' USR1; while :; do sleep 0.2; done"
    job = handle.submit("-N2", "--time=1", "--signal=B:USR1@30", "-o", str(tmp_path / "out"), script)
    assert handle.wait_job(job, timeout=180) == "TIMEOUT"
    assert "warned" in (tmp_path / "out").read_text()


def test_a_failed_node_is_down_soon_and_comes_back_empty(minislurm, tmp_path):
    handle = minislurm(nodes=3)
    script = "--wrap=srun --no-kill -K0 -W0 -N3 sh -c 'echo x > /dev/shm/x; echo up; sleep 1000'"
    job = handle.submit("-N3", "--no-kill", "-o", str(tmp_path / "out"), script)
    wait_for(lambda: (tmp_path / "out").exists() and (tmp_path / "out").read_text().count("up") == 3)
    began = time.monotonic()
    handle.fail_node("n2")
    took_s = time.monotonic() - began
    print(f"DOWN after {took_s:.1f} s")
    assert took_s < 110  # five minutes with Slurm's default
    assert handle.job_processes("n2") == {}
    status = handle.status()
    assert status["state"] == "degraded"
    assert [node["powered"] for node in status["nodes"]] == [True, False, True]
    assert handle.job(job)["JobState"] == "RUNNING"
    assert handle.job_processes("n1") and handle.job_processes("n3")
    handle.restore_node("n2")
    assert handle.status()["state"] == "up"
    assert handle.run_on("n2", ["ls", "/dev/shm"]).stdout == ""
    assert handle.run(["srun", "-w", "n2", "hostname"]).stdout == "n2\n"


def wait_for(condition, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.1)
