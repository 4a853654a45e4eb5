"""What is there now: the record beside what the kernel and Slurm say."""

from __future__ import annotations

from dynarl.slurm.mini import cgroup as cgroups
from dynarl.slurm.mini import cluster
from dynarl.slurm.mini import record as records
from dynarl.slurm.mini.net import Subnet
from dynarl.slurm.mini.processes import label
from dynarl.slurm.mini.spec import HEAD, Paths

SCHEMA = "minislurm-status/1"


def status(paths: Paths) -> dict:
    """State of the cluster as plain data.

    `state` is "down", "starting" (or a start that broke off), "up", "degraded" (a node is off or not usable) or
    "broken" (the head is dead). A node's `slurm` is Slurm's word for it, None if Slurm does not answer.
    """
    record = records.load(paths)
    if record is None or record.boot_id != records.boot_id():
        return {"schema": SCHEMA, "state": "down", "state_dir": str(paths.root), "nodes": []}
    group = cgroups.for_cluster(record.id)
    owners = list(cluster.members(record, group, record.hosts).values())
    slurm = cluster.slurm_states(paths) if record.init(HEAD) else {}
    subnet = Subnet(record.subnet)
    nodes = [
        {
            "name": name,
            "slurm": slurm.get(name),
            "powered": record.init(name) is not None,
            "address": subnet.node(i),
            "processes": owners.count(label(record.id, name)),
        }
        for i, name in enumerate(record.spec.node_names)
    ]
    healthy = all(node["powered"] and node["slurm"] in ("idle", "mixed", "allocated", "completing") for node in nodes)
    state = record.state if record.state != "up" else "up" if healthy else "degraded"
    return {
        "schema": SCHEMA,
        "state": state if record.init(HEAD) else "broken",
        "state_dir": str(paths.root),
        "name": record.spec.name,
        "id": record.id,
        "slurm_conf": str(paths.slurm_conf),
        "network": str(subnet.network),
        "link": subnet.link,
        "gpus_per_node": record.spec.gpus_per_node,
        "cpus_per_node": record.spec.cpus_per_node,
        "cpu_quota": record.spec.cpu_quota,
        "shares": list(record.spec.shares),
        "nodes": nodes,
    }
