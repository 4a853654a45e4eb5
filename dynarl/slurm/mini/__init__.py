"""A real Slurm cluster of N nodes on one machine, for tests and for trying things out.

Each node is a set of Linux namespaces (network, host name, mounts, System V IPC) in which a real munged and a real
slurmd run. One more such set, the head, holds slurmctld and the bridge that joins the nodes. The machine itself is the
login node: one network link leads from it to the bridge, so sbatch, squeue and scancel work on it as usual.

    spec.py        what a cluster is: its shape and its paths                   (pure)
    conf.py        slurm.conf and the files beside it, by Slurm version         (pure)
    net.py         addresses and links
    record.py      what has been started, written down before it is started
    linux.py       system calls that the standard library lacks
    cgroup.py      CPU quota per node, cgroup v1 and v2
    processes.py   whose process is it; killing exactly those
    preflight.py   root, packages, kernel rights
    node.py        the first process of a node; hosts.py starts it
    cluster.py     up, down, fail, restore
    status.py      what is there now
    cli.py         commands and printing
    handle.py      the same for Python programs: tests, benchmarks

Only the standard library is used, and nothing of the rest of dynarl: it has to run on a bare machine.
"""


class MiniSlurmError(Exception):
    """Something that the user can act on. The text says what was wrong and what to do."""
