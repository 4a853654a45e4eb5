"""Records of small made-up jobs, as (type, fields) pairs until `records` numbers them."""


def records(*events):
    """Records from (type, fields) pairs, one second apart."""
    return [
        {"seq": n, "t": float(n), "type": type, "owner": "1.a", **fields} for n, (type, fields) in enumerate(events, 1)
    ]


def job(nodes=("a", "b"), homes=("rollout", "training"), **config):
    started = ("run_started", {"run": "r", "config": config, "job_id": 7, "nodes": list(nodes), "attempt": 1})
    agents = [("agent_up", {"node": n, "rank": i, "home": h}) for i, (n, h) in enumerate(zip(nodes, homes))]
    return [started, *agents, ("step_launched", {"step": 0, "command": [], "nodes": list(nodes)})]


def change(number, roles, **moves):
    """Proposal and commit of an epoch; moves as node=(source, target)."""
    listed = [{"node": n, "source": s, "target": t} for n, (s, t) in moves.items()]
    return [
        ("epoch_proposed", {"epoch": number, "moves": listed, "reason": ""}),
        ("epoch_committed", {"epoch": number, "roles": roles, "moves": listed, "phases": {}, "pause_ms": 10.0}),
    ]


def workers(**roles):
    """Workers that came up, by node: workers(a=("rollout", "training"))."""
    return [
        ("worker_up", {"node": node, "role": role, "device": 0, "attempt": 1})
        for node, started in roles.items() for role in started
    ]


def decision(number, iteration=1, moves=None, reason="it pays", **seen):
    """A decision between staying and `moves` ({node: role}); moves None: it stays. seen: `__` stands for `/`."""
    seen = {name.replace("__", "/"): value for name, value in seen.items()}
    candidates = [{"moves": {}, "finish_s": 20.0, "cost_s": 0.0, "gain_s": 0.0}]
    if moves:
        candidates.append({"moves": moves, "finish_s": 16.5, "cost_s": 0.4, "gain_s": 3.5})
    return ("decision", {
        "number": number, "iteration": iteration, "at_s": 4.25, "seconds": 0.0012, "seen": seen,
        "candidates": candidates, "chosen": len(candidates) - 1, "reason": reason,
    })
