"""Addresses and links of a cluster.

The bridge and the nodes' links live in the head's network namespace, away from the machine's firewall rules, and
vanish with it. The machine gets one interface, `minisl-<a>-<b>`, into subnet 198.<a>.<b>.0/24. Its name stands for the
subnet, so that the kernel's refusal to make a name twice is the lock that keeps two clusters out of one subnet.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import subprocess
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from dynarl.slurm.mini import MiniSlurmError

# Set aside for benchmarks of networks (RFC 2544): no site routes it, unlike 10/8 or 172.16/12.
POOL = ipaddress.ip_network("198.18.0.0/15")


@dataclasses.dataclass(frozen=True)
class Subnet:
    """A /24 of the pool.

    >>> Subnet(257).link, Subnet(257).node(0)
    ('minisl-19-1', '198.19.1.11')
    """

    index: int

    @property
    def network(self) -> ipaddress.IPv4Network:
        return ipaddress.ip_network((int(POOL.network_address) + 256 * self.index, 24))

    @property
    def link(self) -> str:
        """Name of the interface on the machine; at most 15 bytes, the kernel's limit."""
        return f"minisl-{18 + self.index // 256}-{self.index % 256}"

    @property
    def head(self) -> str:
        return str(self.network[1])

    @property
    def login(self) -> str:
        return str(self.network[2])

    def node(self, i: int) -> str:
        return str(self.network[11 + i])


def candidates(seed: str) -> Iterator[Subnet]:
    """All subnets, beginning at a place that depends on `seed`, without those that overlap a route of the machine."""
    routes = json.loads(run(["ip", "-j", "-4", "route", "show", "table", "all"]) or "[]")
    taken = [
        ipaddress.ip_network(route["dst"], strict=False)
        for route in routes
        if route["dst"] not in ("default", "0.0.0.0/0")
    ]
    first = zlib.crc32(seed.encode()) % 512
    for i in range(512):
        subnet = Subnet((first + i) % 512)
        if not any(subnet.network.overlaps(other) for other in taken):
            yield subnet


def run(command: list[str], input: str | None = None) -> str:
    """Output of `command`; MiniSlurmError with its error text if it fails."""
    done = subprocess.run(command, input=input, capture_output=True, text=True)
    if done.returncode:
        raise MiniSlurmError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def batch(commands: str, pid: int | None = None) -> None:
    """Run lines of `ip` commands, in the network namespace of process `pid` if given."""
    inside = ["nsenter", "-t", str(pid), "-n"] if pid else []
    run([*inside, "ip", "-batch", "-"], commands)


def link_head(head_pid: int, outside_pid: int, subnet: Subnet) -> bool:
    """Make the bridge and the machine's link to it. False if another cluster has this subnet."""
    link = f"link add login type veth peer name {subnet.link} netns {outside_pid}"
    try:
        batch(link, head_pid)
    except MiniSlurmError as error:
        if "File exists" in str(error):
            return False
        raise
    # Addresses are IPv4 only (addrgenmode none): otherwise each interface first spends a second on finding an IPv6 one.
    # The ARP table forgets soon: with the kernel's defaults the head goes on for up to 45 s to send to the hardware
    # address of a dead node, and slurmctld calls the node DOWN after 27 s instead of 8 to 15 s.
    batch(
        f"""\
link set lo up
link add br0 type bridge stp_state 0
link set br0 addrgenmode none
addr add {subnet.head}/24 dev br0
link set br0 up
link set login addrgenmode none
link set login master br0 up
ntable change name arp_cache dev br0 base_reachable 1000 delay_probe 1000 retrans 250
""",
        head_pid,
    )
    return True


def link_login(subnet: Subnet, cluster_id: str) -> None:
    """Bring up the machine's end. The alias says whose it is."""
    batch(
        f"""\
link set {subnet.link} alias minislurm-{cluster_id}
link set {subnet.link} addrgenmode none
link set {subnet.link} up
addr add {subnet.login}/24 dev {subnet.link}
"""
    )


def link_node(head_pid: int, node_pid: int, name: str, subnet: Subnet, i: int) -> None:
    """Join a node to the bridge. Its hardware address is made from its number: a restored node has the one that the
    others still have in their ARP tables."""
    mac = f"02:00:{18 + subnet.index // 256:02x}:{subnet.index % 256:02x}:00:{11 + i:02x}"
    batch(
        f"""\
link add {name} type veth peer name eth0 address {mac} netns {node_pid}
link set {name} addrgenmode none
link set {name} master br0 up
""",
        head_pid,
    )
    batch(
        f"link set lo up\nlink set eth0 addrgenmode none\naddr add {subnet.node(i)}/24 dev eth0\nlink set eth0 up\n",
        node_pid,
    )


def unlink_node(head_pid: int, name: str) -> None:
    """Pull a node's cable: from now on it is silent to the others, as a machine without power is."""
    subprocess.run(["nsenter", "-t", str(head_pid), "-n", "ip", "link", "del", name], capture_output=True)


def listens(pid: int, port: int) -> bool:
    """Whether anything listens on a TCP port in the network namespace of process `pid`. Looks, and does not connect:
    daemons take a connection without a message for an error."""
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state = line.split()[:4]
        if state == "0A" and int(local.rpartition(":")[2], 16) == port:
            return True
    return False


def login_link_gone(cluster_id: str, subnet: Subnet | None, timeout_s: float = 5.0) -> str | None:
    """Wait for the cluster's link to vanish, as it does a moment after the head's last process; then delete it.
    Returns the name of a link that stays."""
    deadline = time.monotonic() + timeout_s
    while name := _login_link(cluster_id, subnet):
        if time.monotonic() > deadline:
            subprocess.run(["ip", "link", "del", name], capture_output=True)
            return _login_link(cluster_id, subnet)
        time.sleep(0.05)
    return None


def _login_link(cluster_id: str, subnet: Subnet | None) -> str | None:
    """The machine's interface with this cluster's alias; or the one in its subnet that has no alias yet."""
    for entry in json.loads(run(["ip", "-j", "link", "show"])):
        alias, name = entry.get("ifalias"), entry["ifname"]
        if alias == f"minislurm-{cluster_id}" or (alias is None and subnet and name == subnet.link):
            return name
    return None
