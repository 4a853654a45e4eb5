"""What has to be there before anything is started: root, the packages, and the kernel's permission to make nodes."""

from __future__ import annotations

import ctypes
import glob
import os
import re
import shutil
import subprocess
from pathlib import Path

from dynarl.slurm.mini import MiniSlurmError, linux
from dynarl.slurm.mini.conf import parse_version

# Program to Debian package.
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
    missing = [package for program, package in PACKAGES.items() if shutil.which(program) is None]
    return missing + missing_pmix_packages(glob.glob("/usr/lib/*/slurm-wlm"))


def missing_pmix_packages(plugin_directories: list[str]) -> list[str]:
    """What Debian's Slurm lacks for PMIx, by which the processes of an MPI program find each other.

    Slurm's plugin loads the library by the name it holds, and says so only when a job starts: 24.11 wants
    libpmix.so.2, 22.05 wants libpmix.so, which is in the development package. A Slurm from elsewhere has no such
    directory, and is trusted.
    """
    if not plugin_directories:
        return []
    plugins = [plugin for directory in plugin_directories for plugin in glob.glob(f"{directory}/mpi_pmix_v*.so")]
    if not plugins:
        return ["slurm-wlm-basic-plugins"]
    for name in re.findall(rb"libpmix\.so[.\d]*", Path(plugins[0]).read_bytes()):
        try:
            ctypes.CDLL(name.decode())
        except OSError:
            return ["libpmix-dev" if name == b"libpmix.so" else "libpmix2"]
    return []


def check() -> tuple[int, int]:
    """Version of the installed Slurm. MiniSlurmError with the remedy if a cluster cannot be started here."""
    check_root()
    if missing := missing_packages():
        raise MiniSlurmError(
            f"not installed: {', '.join(missing)}. Type:\n"
            f"    apt-get install -y --no-install-recommends {' '.join(missing)}"
        )
    check_namespaces()
    for path in ("/etc/hosts", "/dev/shm"):
        if not Path(path).exists():
            raise MiniSlurmError(f"{path} does not exist. Create it: every node mounts a private one over it")
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
