"""Up, down, failing and restoring a node.

Order of `up`: record, head (bridge, munged, slurmctld), then all nodes side by side, then wait until each is idle.
Order of `down`: kill whoever belongs to the cluster; the kernel then takes namespaces, mounts, bridge and links by
itself; remove the cgroups; look whether anything is left, and only then forget the record.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable

from dynarl.slurm.mini import MiniSlurmError, conf, net, preflight, processes
from dynarl.slurm.mini import cgroup as cgroups
from dynarl.slurm.mini import record as records
from dynarl.slurm.mini.cgroup import Cgroup
from dynarl.slurm.mini.hosts import Starting
from dynarl.slurm.mini.net import Subnet
from dynarl.slurm.mini.processes import label
from dynarl.slurm.mini.record import Record
from dynarl.slurm.mini.spec import HEAD, ClusterSpec, Paths

SLURMCTLD_PORT = 6817
START_TIMEOUT_S = 90

Say = Callable[[str], None]


def up(paths: Paths, spec: ClusterSpec, say: Say) -> Record:
    """Start a cluster and return when all nodes are idle. The same one, if it is up already, is left as it is."""
    preflight.check_root()
    _claim(paths)
    with records.locked(paths):
        record = records.load(paths)
        if record and record.state == "up" and record.init(HEAD):
            _same_or_error(paths, record.spec, spec)
            if not slurm_states(paths):
                raise MiniSlurmError(f"the cluster in {paths.root} does not answer: `minislurm down`, then up again")
            say(f"already up: {paths.root}")
            for name in record.spec.node_names:
                if not record.init(name):
                    say(f"{name} is off: `minislurm restore-node {name}` starts it")
            return record
        if record:
            say("removing what an unfinished or dead cluster has left")
            _teardown(paths, record)
        version = preflight.check()
        record = Record(uuid.uuid4().hex[:8], "starting", records.boot_id(), spec)
        records.save(paths, record)
        try:
            _start(paths, record, version, say)
        except BaseException:
            _teardown(paths, record)
            raise
        return record


def down(paths: Paths, say: Say) -> bool:
    """Stop the cluster and leave nothing but its logs. False if there was none."""
    preflight.check_root()
    if not paths.lock.exists():
        return False
    with records.locked(paths):
        record = records.load(paths) or records.recover(paths)
        if record is None:
            return False
        _teardown(paths, record)
        return True


def fail_node(paths: Paths, name: str, say: Say, wait: bool = True) -> None:
    """Take the power from a node: it falls silent, and all its processes and its memory are gone."""
    preflight.check_root()
    with records.locked(paths):
        record = running(paths, name)
        cgroup = cgroups.for_cluster(record.id)
        say(f"{name}: off")
        record.inits[name] = None
        records.save(paths, record)
        _power_off(record, cgroup, name)
        if wait:
            _wait_for_states(paths, {name: ("down",)}, record.spec.slurmd_timeout_s * 2 + 60, say)


def restore_node(paths: Paths, name: str, say: Say) -> None:
    """Start a node that failed, with empty memory, and wait until Slurm calls it idle."""
    preflight.check_root()
    with records.locked(paths):
        record = running(paths, name)
        if record.init(name):
            raise MiniSlurmError(f"{name} is running; fail-node {name} first")
        cgroup = cgroups.for_cluster(record.id)
        _power_off(record, cgroup, name)  # what its first process left behind when it died by itself
        node = Starting(paths, record, cgroup, name)
        try:
            _start_nodes(record, [node])
        except BaseException:
            _power_off(record, cgroup, name)
            raise
        _wait_for_states(paths, {name: ("idle", "mixed", "allocated")}, START_TIMEOUT_S, say)


def running(paths: Paths, node: str | None = None) -> Record:
    """The record of a cluster that is up. MiniSlurmError if it is not, or has no such node."""
    record = records.load(paths)
    if record is None or not record.init(HEAD):
        raise MiniSlurmError(f"no cluster is up in {paths.root}: start one with `minislurm up --nodes N`")
    if node is not None and node not in record.spec.node_names:
        raise MiniSlurmError(f"no node {node!r}: this cluster has {' '.join(record.spec.node_names)}")
    return record


def members(record: Record, cgroup: Cgroup | None, hosts: tuple[str, ...]) -> dict[int, str]:
    """Processes of these hosts of the cluster, as {pid: label}."""
    in_groups = set().union(*(cgroup.pids(host) for host in hosts)) if cgroup else set()
    found = processes.members({label(record.id, host) for host in hosts}, in_groups)
    inits = {process.pid: label(record.id, host) for host in hosts if (process := record.init(host))}
    return inits | found


def _claim(paths: Paths) -> None:
    """Make the state directory ours. A directory with foreign files is refused: `down` removes what is in it."""
    if paths.root.is_dir() and not paths.lock.exists() and any(paths.root.iterdir()):
        raise MiniSlurmError(f"{paths.root} holds files that are not minislurm's: choose an empty --state-dir")
    paths.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    paths.root.chmod(0o700)


def _same_or_error(paths: Paths, here: ClusterSpec, wanted: ClusterSpec) -> None:
    differences = [line for line in here.differences(wanted) if not line.startswith("shares:")]
    differences += [
        f"share {share}: not shared here"
        for share in wanted.shares
        if not any(share == top or share.startswith(top + "/") for top in here.shares)
    ]
    if differences:
        raise MiniSlurmError(
            f"a different cluster is up in {paths.root}:\n    " + "\n    ".join(differences) + "\n"
            "`minislurm down` it first, or use another --state-dir"
        )


def _start(paths: Paths, record: Record, version: tuple[int, int], say: Say) -> None:
    began = time.monotonic()
    cgroup = cgroups.for_cluster(record.id)
    if cgroup:
        cgroup.prepare(quotas=record.spec.cpu_quota is not None)
    elif record.spec.cpu_quota is not None:
        raise MiniSlurmError("--cpu-quota: no writable cgroup hierarchy with the cpu controller on this machine")
    for directory in (paths.etc, paths.log, paths.state_save, paths.local):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
    descriptor = os.open(paths.munge_key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    os.write(descriptor, os.urandom(128))
    os.close(descriptor)
    subnet = _start_head(paths, record, cgroup, version)
    say(f"head: slurmctld {version[0]}.{version[1]:02}, {subnet.network} ({time.monotonic() - began:.1f} s)")
    _start_nodes(record, [Starting(paths, record, cgroup, name) for name in record.spec.node_names])
    _wait_for_states(paths, {name: ("idle",) for name in record.spec.node_names}, START_TIMEOUT_S, say)
    record.state = "up"
    records.save(paths, record)
    say(f"up: {record.spec.nodes} nodes in {time.monotonic() - began:.1f} s")


def _start_head(paths: Paths, record: Record, cgroup: Cgroup | None, version: tuple[int, int]) -> Subnet:
    # The file that is bound over /etc/hosts must be there before the namespaces, and is filled in when the subnet is
    # known.
    paths.hosts.touch()
    head = Starting(paths, record, cgroup, HEAD)
    head.send("go")
    head.expect("ready namespaces")
    for subnet in net.candidates(str(paths.root)):
        record.subnet = subnet.index
        records.save(paths, record)
        if net.link_head(head.pid, os.getpid(), subnet):
            break
    else:
        raise MiniSlurmError(f"no free subnet in {net.POOL}")
    net.link_login(subnet, record.id)
    memory_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    paths.hosts.write_text(conf.hosts(record.spec, subnet, socket.gethostname()))
    paths.slurm_conf.write_text(conf.slurm_conf(record.spec, paths, subnet, memory_mb))
    if cgroup and record.spec.cpu_quota is not None:
        cgroup.create_batch()
        paths.task_prolog.write_text(cgroup.task_prolog())
        paths.task_prolog.chmod(0o755)
    (paths.etc / "gres.conf").write_text(conf.gres_conf(record.spec, paths))
    (paths.etc / "cgroup.conf").write_text(conf.cgroup_conf(version))
    head.send("daemons")
    head.expect("ready daemons")
    head.close()
    deadline = time.monotonic() + START_TIMEOUT_S
    while not net.listens(head.pid, SLURMCTLD_PORT):
        if time.monotonic() > deadline:
            raise MiniSlurmError(f"slurmctld does not answer; its log ends:\n{_tail(paths, 'slurmctld')}")
        time.sleep(0.05)
    return subnet


def _start_nodes(record: Record, nodes: list[Starting]) -> None:
    """Take nodes through their stages side by side."""
    head = record.init(HEAD)
    subnet = Subnet(record.subnet)
    for node in nodes:
        node.send("go")
    for node in nodes:
        node.expect("ready namespaces")
        net.link_node(head.pid, node.pid, node.host, subnet, record.spec.node_names.index(node.host))
        node.send("daemons")
    for node in nodes:
        node.expect("ready daemons")
        node.close()


def slurm_states(paths: Paths) -> dict[str, str]:
    """State of each node in Slurm's words, e.g. {"n1": "idle"}; a "*" at the end says that it does not answer."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SINFO_"))}
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%N %T"], capture_output=True, text=True, timeout=60,
        env={**environment, "SLURM_CONF": str(paths.slurm_conf)},
    )  # fmt: skip
    return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}


def _wait_for_states(paths: Paths, wanted: dict[str, tuple[str, ...]], timeout_s: float, say: Say) -> None:
    began = time.monotonic()
    while True:
        states = slurm_states(paths)
        missing = {
            name: states.get(name, "unknown")
            for name, good in wanted.items()
            if states.get(name, "").rstrip("*~#") not in good
        }
        if not missing:
            break
        if time.monotonic() - began > timeout_s:
            said = ", ".join(f"{name} is {state}" for name, state in missing.items())
            log = _tail(paths, f"slurmd-{next(iter(missing))}")
            raise MiniSlurmError(f"after {timeout_s:.0f} s {said}. Its slurmd's log ends:\n{log}")
        time.sleep(0.1)
    if len(wanted) == 1:
        say(f"{next(iter(wanted))}: {states[next(iter(wanted))]} after {time.monotonic() - began:.1f} s")


def _tail(paths: Paths, name: str, lines: int = 8) -> str:
    try:
        return "\n".join((paths.log / f"{name}.log").read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return f"(no {paths.log}/{name}.log)"


def _power_off(record: Record, cgroup: Cgroup | None, name: str) -> None:
    if head := record.init(HEAD):
        net.unlink_node(head.pid, name)
    if left := _kill(record, cgroup, (name,)):
        raise MiniSlurmError(f"processes of {name} that do not die: {sorted(left)}")


def _kill(record: Record, cgroup: Cgroup | None, hosts: tuple[str, ...]) -> set[int]:
    """Kill what belongs to these hosts; returns what did not die. The first processes go last: until then they reap
    the others, which a machine for tests often has nobody else for."""
    inits = {process.pid for host in hosts if (process := record.init(host))}
    processes.kill_all(lambda: set(members(record, cgroup, hosts)) - inits)
    return processes.kill_all(lambda: set(members(record, cgroup, hosts)))


def _teardown(paths: Paths, record: Record) -> None:
    """Remove everything of this cluster but its logs. MiniSlurmError names what could not be removed; the record
    stays then."""
    left = []
    if record.boot_id == records.boot_id():  # else a reboot has removed all but the files
        cgroup = cgroups.for_cluster(record.id)
        if os.getpid() in members(record, cgroup, record.hosts):
            raise MiniSlurmError("this command runs inside the cluster that it is to stop: run it outside")
        left += [f"process {pid}" for pid in _kill(record, cgroup, record.hosts)]
        left += [f"cgroup {group}" for group in (cgroup.remove_all() if cgroup else [])]
        if link := net.login_link_gone(record.id, Subnet(record.subnet) if record.subnet >= 0 else None):
            left.append(f"network link {link}")
    if left:
        raise MiniSlurmError(f"could not be removed: {', '.join(left)}. Remove the cause, then `minislurm down` again")
    for directory in (paths.etc, paths.state_save, paths.local):
        shutil.rmtree(directory, ignore_errors=True)
    paths.record.unlink(missing_ok=True)
