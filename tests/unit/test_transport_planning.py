"""Every rank plans for itself: what they come to fits together."""

import itertools

import numpy as np
import pytest

from dynarl.controller.replicas import layout_on
from dynarl.transport.messages import Lanes, num_bytes
from dynarl.transport.mpi import ExchangeError, neighbours, tags
from dynarl.transport.planning import Request, ByNode, describe, layout_of, plan_rank, schedule_of
from dynarl.vps.layout import EngineLayout
from dynarl.vps.train_layout import TrainLayout

MODEL = {
    "model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 131, "tie_word_embeddings": True,
}  # fmt: skip

EXPERTS = MODEL | {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "tie_word_embeddings": False, "head_dim": 16, "norm_topk_prob": True,
}  # fmt: skip


def sync(nodes: int, devices: int) -> Request:
    places = Request(MODEL, {}, {}, [], nodes, devices).places
    owners = TrainLayout(dp=2, ranks=(0, 1))
    everywhere = EngineLayout(dp=nodes, ranks=[places.staging_rank(n) for n in range(nodes)])
    return Request(MODEL, describe(owners), describe(everywhere), ["param"], nodes, devices, piece_bytes=4096)


def recut() -> Request:
    return Request(
        MODEL, describe(TrainLayout(tp=2, dp=2)), describe(TrainLayout(pp=2, dp=2)), ["param", "master"], 2, 2,
        piece_bytes=4096,
    )  # fmt: skip


@pytest.mark.parametrize("request_", [sync(3, 1), sync(2, 2), recut()])
def test_what_one_rank_sends_is_what_the_other_expects(request_):
    plans = {rank: plan_rank(request_, rank) for rank in request_.ranks()}
    assert len({plan.digest for plan in plans.values()}) == 1
    schedules = {r: schedule_of(request_, p) for r, p in plans.items()}
    sent = {(r, m.peer, m.round, m.part): (m.num_bytes, m.fragments) for r, s in schedules.items() for m in s.outgoing}
    expected = {
        (m.peer, r, m.round, m.part): (m.num_bytes, m.fragments) for r, s in schedules.items() for m in s.incoming
    }
    assert sent == expected and sent
    assert sum(n for n, _ in sent.values()) == sum(plan.bytes_received for plan in plans.values())


@pytest.mark.parametrize("request_", [sync(3, 1), sync(2, 2), recut()])
def test_both_ends_of_a_message_have_the_same_tag(request_):
    places = request_.places
    schedules = {}
    for rank in request_.ranks():
        plan = plan_rank(request_, rank)
        schedules[rank] = schedule_of(request_, plan)
    seen: dict = {}
    for node in range(request_.num_nodes):
        mine = [rank for rank in schedules if places.node_of(rank) == node]
        for sends, way in ((True, "outgoing"), (False, "incoming")):
            found = tags(places, ((r, m) for r in mine for m in getattr(schedules[r], way)), sends)
            for (rank, number), tag in found.items():
                m = getattr(schedules[rank], way)[number]
                sender, receiver = (rank, m.peer) if sends else (m.peer, rank)
                seen.setdefault((sender, receiver, m.round, m.part), []).append(tag)
    assert seen and all(len(found) == 2 and found[0] == found[1] for found in seen.values())
    ways: dict = {}
    for (sender, receiver, *_), (tag, _) in seen.items():
        ways.setdefault((places.node_of(sender), places.node_of(receiver)), []).append(tag)
    assert all(sorted(listed) == list(range(len(listed))) for listed in ways.values())


def test_ranks_that_do_not_agree_are_named():
    request = recut()
    lanes = {}
    for rank in (0, 1):
        plan = plan_rank(request, rank)
        schedule = schedule_of(request, plan)
        if rank == 1:
            schedule.outgoing = [m for m in schedule.outgoing if m.peer != 0]
        lanes[rank] = Lanes.of(schedule, rank, request.places, request.ring_bytes)
    with pytest.raises(ExchangeError, match=r"rank 0 expects \d+ bytes from rank 1, which sends none"):
        neighbours(lanes, request.places)


def test_ranks_are_numbered_by_node_for_the_planner_and_back():
    nodes = ByNode(sync(3, 2))
    places = sync(3, 2).places
    ranks = [*range(6), *(places.staging_rank(n) for n in range(3))]
    assert sorted(nodes.inner(r) for r in ranks) == list(range(9))
    assert all(nodes.outer(nodes.inner(r)) == r and nodes.inner(r) // 3 == places.node_of(r) for r in ranks)
    with pytest.raises(ValueError, match="rank 9 is on none of 3 nodes with 2 devices"):
        places.node_of(9)


def missing(request: Request) -> int:
    """Bytes of the model that each node's own workers have none of, summed over the nodes."""
    spec, (source, _) = request.spec, request.layouts()
    total = 0
    for node in range(request.num_nodes):
        seen = [np.zeros(tensor.shape, bool) for tensor in spec.tensors]
        for rank in (r for r in source.ranks if request.places.node_of(r) == node):
            held = source.pieces(spec, "param", [rank])
            for i, tensor in enumerate(held.tensor.tolist()):
                seen[tensor][tuple(slice(*side) for side in held.box(i, seen[tensor].ndim))] = True
        total += sum(int((~some).sum()) for some in seen)
    return total * spec.itemsize("param")


DEGREES = [(tp, pp, ep) for tp in (1, 2, 4) for pp in (1, 2) for ep in (1, 2)]


@pytest.mark.parametrize("model", [MODEL, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("nodes, devices", [(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2), (3, 4)])
def test_weights_cross_the_network_only_where_a_node_has_not_got_them(model, nodes, devices):
    places = Request(model, {}, {}, [], nodes, devices).places
    everywhere = EngineLayout(dp=nodes, ranks=[places.staging_rank(node) for node in range(nodes)])
    tried = 0
    for owners in (some for n in range(1, nodes + 1) for some in itertools.combinations(range(nodes), n)):
        workers = [places.worker_rank(node, device) for node in owners for device in range(devices)]
        for tp, pp, ep in DEGREES:
            if devices % tp or len(workers) % (tp * pp * ep) or (ep > 1 and model is MODEL):
                continue
            layout = layout_on(workers, tp, pp, ep, 1)
            request = Request(model, describe(layout), describe(everywhere), ["param"], nodes, devices)
            between = sum(
                num_bytes(exchange.into, plan.item_bytes)
                for plan in (plan_rank(request, rank) for rank in request.ranks())
                for exchange in plan.transfers
                if places.node_of(exchange.peer) != places.node_of(plan.rank)
            )
            assert between == missing(request), (owners, tp, pp, ep)
            tried += 1
    assert tried >= nodes


def test_layouts_with_live_intervals_travel():
    layout = TrainLayout(dp=2).with_shards({0: {(0, "x.weight"): (0, 5)}, 1: {(0, "x.weight"): (5, 9)}})
    assert layout_of(describe(layout)) == layout
    with pytest.raises(ValueError, match="layout 'Other' is not one of"):
        layout_of({"layout": "Other"})
