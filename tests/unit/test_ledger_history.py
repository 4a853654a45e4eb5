"""Any history that nodes, workers and the network can produce trains every sample exactly once.

The machine holds what the ledger cannot see: answers in the making on each node, leases in workers' queues, messages still
on their way, and the gradient buffers themselves. A step adds up the buffers of the nodes that the ledger names; what is in
that sum is what was trained on.
"""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynarl import wire
from dynarl.dataflow.ledger import Ledger

NODES = ["n1", "n2", "n3"]
node = st.sampled_from(NODES)
pick = st.integers(min_value=0, max_value=10**6)  # an index, taken modulo what there is


class History(RuleBasedStateMachine):
    @initialize(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4), scored=st.booleans(), halves=st.booleans(),
                progress=st.lists(st.tuples(st.integers(0, 3), node), min_size=4, max_size=4))
    def begin(self, sizes, scored, halves, progress):
        """`progress`: how far each group is already (0 not begun, 1 generated, 2 scored, 3 accumulated), and on which node."""
        self.samples = [wire.sample_id(1, prompt, member) for prompt, size in enumerate(sizes) for member in range(size)]
        self.ledger = Ledger(self.samples, scored_by_inference=scored)
        groups = list(self.ledger.groups.values())
        middle = len(groups) // 2
        self.batches = [batch for batch in ([groups[:middle], groups[middle:]] if halves else [groups]) if batch]
        self.owner = {}  # sample -> node whose answer counts
        self.copies = []  # (sample, node): answers in the making, also those nobody waits for any more
        self.finished = set()
        self.queues = {"scoring": [], "training": []}  # leases in workers: (lease, group name, node)
        self.messages = []  # completions on their way: (kind, lease, group name, node)
        self.held = {}  # lease -> kind, the leases that are good
        self.buffers = {name: Counter() for name in NODES}
        self.trained = Counter()
        for group, (stages, where) in zip(groups, progress):
            self.advance(group, stages, where)

    def advance(self, group, stages, where):
        if stages >= 1:
            while not set(group.samples) <= self.finished:
                self.dispatch(where, 1)
                self.finish(len(self.copies) - 1)
        if stages >= 2 and group.state == "generated":
            self.complete(group, where)
        if stages >= 3 and group in self.batch():
            self.complete(group, where)

    def complete(self, group, where):
        lease = self.ledger.lease(group, where)
        kind = self.held[lease] = group.state
        self.queues[kind].append((lease, group.name, where))
        self.work(kind, len(self.queues[kind]) - 1)
        self.deliver(len(self.messages) - 1, False)

    # --- generation

    @rule(where=node, count=st.integers(1, 4))
    def dispatch(self, where, count):
        for sample, holder in self.ledger.dispatch(where, self.ledger.waiting(count)):
            assert sample not in self.owner and sample not in self.finished
            self.owner[sample] = where
            self.copies.append((sample, where))

    @precondition(lambda self: self.copies)
    @rule(index=pick)
    def finish(self, index):
        sample, where = self.copies.pop(index % len(self.copies))
        group = self.ledger.groups[wire.group_of(sample)]
        before = (dict(group.holders), group.state)
        full = self.ledger.finished(sample, where, reward=1.0, tokens=1, finish="stop")
        if self.owner.get(sample) != where:
            assert full is None and before == (group.holders, group.state)
            return
        del self.owner[sample]
        self.finished.add(sample)
        assert (full is not None) == (set(group.samples) <= self.finished)

    @precondition(lambda self: self.owner)
    @rule(index=pick, from_scratch=st.booleans(), still_verified=st.booleans())
    def give_back(self, index, from_scratch, still_verified):
        """An abort, or a hand-out that failed. `still_verified`: a complete answer is with the verifier and comes later."""
        sample, where = sorted(self.owner.items())[index % len(self.owner)]
        assert self.ledger.returned(sample, where, holder=None if from_scratch else where)
        del self.owner[sample]
        if not still_verified:
            self.copies.remove((sample, where))

    @precondition(lambda self: self.copies)
    @rule(index=pick, where=node)
    def give_back_what_is_not_there(self, index, where):
        sample, _ = self.copies[index % len(self.copies)]
        if self.owner.get(sample) != where:
            assert not self.ledger.returned(sample, where, holder=where)

    # --- scoring and training

    def batch(self):
        return next(batch for batch in self.batches if any(group.state != "trained" for group in batch))

    def all_trained(self):
        return all(group.state == "trained" for group in self.ledger.groups.values())

    @rule(where=node, index=pick)
    def lease(self, where, index):
        wanted = [] if self.all_trained() else [group.name for group in self.batch()]
        ready = self.ledger.in_state("generated") + [g for g in self.ledger.in_state("scored") if g.name in wanted]
        if ready:
            group = ready[index % len(ready)]
            assert set(group.samples) <= self.finished, "a group was handed out in part"
            kind = {"generated": "scoring", "scored": "training"}[group.state]
            lease = self.ledger.lease(group, where)
            assert lease not in self.held
            self.queues[kind].append((lease, group.name, where))
            self.held[lease] = kind

    @rule(kind=st.sampled_from(["scoring", "training"]), index=pick)
    def work(self, kind, index):
        """A worker finishes a lease; for training its gradient is in the buffer from here on."""
        if self.queues[kind]:
            lease, name, where = self.queues[kind].pop(index % len(self.queues[kind]))
            if kind == "training":
                self.buffers[where][name] += 1
            self.messages.append((kind, lease, name, where))

    @precondition(lambda self: self.messages)
    @rule(index=pick, again=st.booleans())
    def deliver(self, index, again):
        kind, lease, name, where = self.messages[index % len(self.messages)]
        if not again:
            self.messages.pop(index % len(self.messages))
        group = (self.ledger.scored if kind == "scoring" else self.ledger.accumulated)(lease)
        if self.held.get(lease) != kind:
            assert group is None, "a stale lease was taken"
            return
        assert group.name == name
        self.held[lease] = "completed"
        if kind == "scoring":
            assert group.holders == dict.fromkeys(group.samples, where)

    @rule(kind=st.sampled_from(["scoring", "training"]), index=pick)
    def hand_back(self, kind, index):
        """A worker that has not started a lease gives it up."""
        if self.queues[kind]:
            lease, name, _ = self.queues[kind].pop(index % len(self.queues[kind]))
            group = self.ledger.handed_back(lease)
            if self.held.pop(lease, None) == kind:
                assert group.name == name
            else:
                assert group is None

    @precondition(lambda self: not self.all_trained() and all(group.state == "accumulated" for group in self.batch()))
    @rule()
    def step(self):
        batch = self.batch()
        total = Counter()
        for where in {group.node for group in batch}:
            total += self.buffers[where]
        assert total == Counter(group.name for group in batch), "the gradient of the step is not that of its groups"
        self.buffers = {name: Counter() for name in NODES}
        self.trained.update(self.ledger.trained(batch))

    # --- faults

    @rule(where=node, role=st.sampled_from(["rollout", "inference", "training"]), verified_later=st.booleans())
    def worker_dies(self, where, role, verified_later):
        lost = self.ledger.worker_lost(where, role)
        if role == "rollout":
            assert sorted(lost) == sorted(s for s, n in self.owner.items() if n == where)
            self.owner = {s: n for s, n in self.owner.items() if n != where}
            if not verified_later:
                self.copies = [(s, n) for s, n in self.copies if n != where]
            return
        kind = {"inference": "scoring", "training": "training"}[role]
        gone = [entry for entry in self.queues[kind] if entry[2] == where]
        self.queues[kind] = [entry for entry in self.queues[kind] if entry[2] != where]
        for lease, _, _ in gone:
            self.held.pop(lease, None)
        # Its messages may still arrive, after the news of its death.
        for sent, lease, _, n in self.messages:
            if sent == kind and n == where and self.held.get(lease) == kind:
                del self.held[lease]
        if role == "training":
            self.buffers[where].clear()

    # --- always

    @invariant()
    def every_sample_is_in_one_place(self):
        if not hasattr(self, "ledger"):
            return
        waiting = self.ledger.waiting()
        assert self.ledger.running == self.owner
        assert Counter([*waiting, *self.owner, *self.finished]) == Counter(self.samples)
        assert max(self.trained.values(), default=1) == 1

    def teardown(self):
        """Left in peace, what is left is trained."""
        if not hasattr(self, "ledger"):
            return
        for _ in range(4 * len(self.samples) + 4 * len(self.messages) + 20):
            if self.all_trained():
                break
            self.dispatch("n1", 4)
            while self.copies:
                self.finish(0)
            self.lease("n2", 0)
            for kind in ("scoring", "training"):
                self.work(kind, 0)
            while self.messages:
                self.deliver(0, False)
            if not self.all_trained() and all(group.state == "accumulated" for group in self.batch()):
                self.step()
        assert self.trained == Counter(self.samples)


History.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None,
                                     suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
test_any_history_trains_every_sample_once = History.TestCase
