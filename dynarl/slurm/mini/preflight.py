"""What has to be there before anything is started: root, the packages, and the kernel's permission to make nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from dynarl.slurm.mini import MiniSlurmError, linux
from dynarl.slurm.mini.conf import parse_version

# Program to Debian package. PMIx, the way MPI programs find each other, is a plugin of Slurm's basic plugins.
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")


def complete_path() -> None:
    """Add the directories of daemons to PATH for this process and its children: su and sudo often leave them out."""
    parts = os.environ.get("PATH", "/usr/bin:/bin").split(":")
    os.environ["PATH"] = ":".join(parts + [p for p in SBIN if p not in parts])


def missing_packages() -> list[str]:
    return [package for program, package in PACKAGES.items() if shutil.which(program) is None]


def check() -> tuple[int, int]:
    """Version of the installed Slurm. MiniSlurmError with the remedy if a cluster cannot be started here."""
    check_root()
    if missing := missing_packages():
        raise MiniSlurmError(
            f"not installed: {', '.join(missing)}. Type:\n"
            f"    apt-get install -y --no-install-recommends {' '.join(missing)} slurm-wlm-basic-plugins"
        )
    check_namespaces()
    for path in ("/etc/hosts", "/dev/shm"):
        if not Path(path).exists():
            raise MiniSlurmError(f"{path} does not exist, and every node needs a private one mounted over it: create it")
    done = subprocess.run(["slurmd", "-V"], capture_output=True, text=True)
    if done.returncode:
        raise MiniSlurmError(f"`slurmd -V` failed: {done.stderr.strip()}")
    return parse_version(done.stdout)


def check_root() -> None:
    if os.geteuid() != 0:
        raise MiniSlurmError("root is needed (namespaces, mounts, network links): run it as root or with sudo")


def check_namespaces() -> None:
    """Try in a child what node.py will do, so that a container without the right is told so in one line."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            linux.unshare(linux.NODE_NAMESPACES)
            linux.mount("none", "/", flags=linux.MS_REC | linux.MS_SLAVE)
            linux.mount("minislurm-check", "/tmp", "tmpfs")
        except OSError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        problem = file.read()
    os.waitpid(pid, 0)
    if problem:
        raise MiniSlurmError(
            f"the kernel refuses a node's namespaces ({problem}). In a container: start it with --privileged, "
            "or with --cap-add SYS_ADMIN --cap-add NET_ADMIN and without seccomp and AppArmor profiles"
        )
