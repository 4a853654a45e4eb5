"""The first process of a host (a node or the head): enters namespaces, starts the daemons, reaps what they leave.

    python3 -m dynarl.slurm.mini.node STATE_DIR CLUSTER_ID HOST GPUS SHARE...

It waits for a line on its standard input before each stage, so that the one that starts it can write down what is
about to be made. If that one dies in between, the input ends and so does this process.

    go       namespaces and mounts                              answers "ready namespaces"
    daemons  munged and slurmd or slurmctld (links are there)   answers "ready daemons"

Any failure is answered with "error <text>".
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

from dynarl.slurm.mini import linux
from dynarl.slurm.mini.processes import label
from dynarl.slurm.mini.spec import HEAD, Paths

PRIVATE = ("/tmp", "/dev/shm")


def main() -> None:
    state_dir, cluster_id, host, gpus, *shares = sys.argv[1:]
    paths = Paths(Path(state_dir))
    stage = "start"
    try:
        wait_for("go")
        stage = "namespaces"
        linux.become_subreaper()
        linux.unshare(linux.NODE_NAMESPACES)
        linux.set_hostname(host)
        mount_private(paths, label(cluster_id, host), host, shares)
        answer("ready namespaces")
        wait_for("daemons")
        stage = "daemons"
        daemons = start_daemons(paths, host, int(gpus))
        answer("ready daemons")
    except Exception as error:
        answer(f"error {host}, {stage}: {error}".replace("\n", " "))
        sys.exit(1)
    detach(paths, host)
    reap(daemons)


def wait_for(line: str) -> None:
    if sys.stdin.readline().strip() != line:
        sys.exit(1)


def answer(line: str) -> None:
    print(line, flush=True)


def mount_private(paths: Paths, source: str, host: str, shares: list[str]) -> None:
    """Give this host its own /tmp, /dev/shm, /etc/hosts and <state>/local; everything else stays the machine's.

    Every mount carries `source`, the mark by which processes.py knows who belongs to the host.
    """
    # Slave: what is mounted here stays here, while what the machine mounts later (home directories) appears here too.
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_SLAVE)
    # Opened before they are covered: a directory under /tmp can then still be bound to its old place.
    handles = {share: os.open(share, os.O_PATH | os.O_DIRECTORY) for share in shares}
    for target in PRIVATE:
        linux.mount(source, target, "tmpfs", linux.MS_NOSUID, "mode=1777")
    for share, handle in handles.items():
        os.makedirs(share, exist_ok=True)
        linux.mount(f"/proc/self/fd/{handle}", share, flags=linux.MS_BIND | linux.MS_REC)
        os.close(handle)
    # The head's local directory is the one that the machine sees: its munged serves the login node too.
    if host != HEAD:
        linux.mount(source, str(paths.local), "tmpfs", linux.MS_NOSUID, "mode=0755")
    linux.mount(str(paths.hosts), "/etc/hosts", flags=linux.MS_BIND)


def start_daemons(paths: Paths, host: str, gpus: int) -> dict[int, str]:
    """Start munged, wait for its socket, start slurmd or slurmctld. Returns {pid: name}."""
    make_devices(paths.devices, gpus)
    paths.spool.mkdir(exist_ok=True)
    paths.munge_socket.parent.mkdir(mode=0o755, exist_ok=True)
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "SLURM_CONF": str(paths.slurm_conf),
        "HOME": "/root",
        "LANG": "C.UTF-8",
    }

    def start(name: str, *arguments: str) -> subprocess.Popen:
        log = open(paths.log / f"{host}.log", "a")
        return subprocess.Popen(
            [name, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd="/",
            start_new_session=True,
        )

    # A munged of its own per host: one that is shared takes the second use of a credential for a replay.
    munge = paths.munge_socket.parent
    munged = start(
        "munged", "--foreground", "--force", "--num-threads=2", f"--key-file={paths.munge_key}",
        f"--socket={paths.munge_socket}", f"--pid-file={munge}/pid", f"--seed-file={munge}/seed",
    )  # fmt: skip
    deadline = time.monotonic() + 20
    while not paths.munge_socket.is_socket():
        if munged.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"munged did not start; see {paths.log}/{host}.log")
        time.sleep(0.01)
    daemon = start("slurmctld", "-D") if host == HEAD else start("slurmd", "-D")
    return {munged.pid: "munged", daemon.pid: "slurmctld" if host == HEAD else "slurmd"}


def make_devices(directory: Path, gpus: int) -> None:
    """Character devices that stand for GPUs. They are copies of /dev/null, whose number is allowed everywhere."""
    directory.mkdir(exist_ok=True)
    for i in range(gpus):
        os.mknod(directory / f"nvidia{i}", stat.S_IFCHR | 0o666, os.makedev(1, 3))


def detach(paths: Paths, host: str) -> None:
    """Let go of the starter's pipes; from now on what is said goes to the host's log."""
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(paths.log / f"{host}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)


def reap(daemons: dict[int, str]) -> None:
    """Collect ended children for ever. Many machines for tests have a process 1 that does not."""
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            time.sleep(1)
            continue
        if pid in daemons:
            answer(f"{daemons[pid]} ended with status {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
