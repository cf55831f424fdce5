"""A world driven at random: any operation, in any lane and state, right or wrong; a model knows the rest."""

import collections

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

import symm_a2a
from symm_a2a import EPConfig, VirtualWorld, reference
from tests.cases import examples, use_small_blocks

W, E, K, D, C, LANES = 3, 6, 2, 4, 5, 2
MISTAKES = ["rows", "dtype", "tokens", "ids", "lane", "ranks"]


class Dispatched:
    """What a dispatch gave, and what it was of."""

    def __init__(self, world, xs, scores, ids, lane, result):
        self.world, self.xs, self.scores, self.ids, self.lane = world, xs, scores, ids, lane
        self.rows, self.counts, self.handles = result
        self.kept = [rows.detach().clone() for rows in self.rows]
        self.passed_back = False


class World(RuleBasedStateMachine):
    """Rules pick a lane; a lane that is busy has to refuse, and to stay what it is."""

    dispatches = Bundle("dispatches")
    flying = Bundle("flying")

    def __init__(self):
        super().__init__()
        self.seed = 0
        self.latest = collections.deque(maxlen=3)
        self.exchanges = dict.fromkeys(("dispatch", "combine", "dispatch_again", "combine_backward"), 0)
        self.begin(small=False, pad=1, capacity="exact")

    def begin(self, small, pad, capacity):
        self.cfg = EPConfig(
            num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=C, dtype=torch.float64, num_lanes=LANES,
            pad_multiple=pad, capacity=capacity, overflow="drop",
        )  # fmt: skip
        self.world = VirtualWorld(self.cfg, W, "cpu")
        if small:
            use_small_blocks(self.world)
        self.busy = set()
        self.exchanges = dict.fromkeys(self.exchanges, 0)

    def draw(self, tokens):
        self.seed += 1
        gen = torch.Generator().manual_seed(self.seed)
        xs = [torch.randn(T, D, generator=gen, dtype=torch.float64).requires_grad_() for T in tokens]
        scores = [torch.rand(T, K, generator=gen, dtype=torch.float64).requires_grad_() for T in tokens]
        ids = [torch.randint(-1, E, (T, K), generator=gen) for T in tokens]
        return xs, scores, ids

    def routing(self, one):
        return one.ids, E, self.cfg.pad_multiple, self.cfg.capacity

    def current(self, one):
        return one.world is self.world

    @rule(small=st.booleans(), pad=st.sampled_from([1, 4]), capacity=st.sampled_from(["exact", 8, 200]))
    def create_anew(self, small, pad, capacity):
        self.world.close()
        self.begin(small, pad, capacity)

    @rule(target=dispatches, tokens=st.tuples(*[st.integers(0, C)] * W), lane=st.integers(0, LANES - 1))
    def dispatch(self, tokens, lane):
        given = self.draw(tokens)
        if lane in self.busy:
            with pytest.raises(symm_a2a.LaneBusyError, match=f"lane {lane} to be idle"):
                self.world.dispatch(*given, lane=lane)
            lane = next((other for other in range(LANES) if other not in self.busy), None)
            if lane is None:
                return None
        self.exchanges["dispatch"] += 1
        return self.checked(Dispatched(self.world, *given, lane, self.world.dispatch(*given, lane=lane)))

    @precondition(lambda self: len(self.busy) < LANES)
    @rule(target=flying, tokens=st.tuples(*[st.integers(0, C)] * W))
    def launch(self, tokens):
        lane = min(set(range(LANES)) - self.busy)
        given = self.draw(tokens)
        pending = self.world.dispatch_async(*given, lane=lane)
        self.busy.add(lane)
        self.exchanges["dispatch"] += 1
        return self.world, given, lane, pending

    @rule(target=dispatches, flight=consumes(flying))
    def join(self, flight):
        world, given, lane, pending = flight
        if world is not self.world:
            with pytest.raises(symm_a2a.ClosedError):
                pending.join()
            return None
        result = pending.join()
        self.busy.discard(lane)
        with pytest.raises(symm_a2a.JoinedTwiceError):
            pending.join()
        return self.checked(Dispatched(self.world, *given, lane, result))

    def checked(self, one):
        rows, counts = reference.dispatch(one.xs, *self.routing(one))
        for rank in range(W):
            assert torch.equal(one.rows[rank], rows[rank])
            assert torch.equal(one.counts[rank], counts[rank])
        self.latest.append(one)
        return one

    @rule(one=dispatches, back=st.booleans())
    def combine(self, one, back):
        if one is None:
            return
        ys = [rows * 3 for rows in one.rows]
        if not self.current(one):
            with pytest.raises((symm_a2a.InputError, symm_a2a.ClosedError)):
                self.world.combine(ys, one.handles)
            return
        if one.lane in self.busy:
            with pytest.raises(symm_a2a.LaneBusyError):
                self.world.combine(ys, one.handles)
            return
        outs = self.world.combine(ys, one.handles)
        self.exchanges["combine"] += 1
        rows, _ = reference.dispatch(one.xs, *self.routing(one))
        right = reference.combine([r * 3 for r in rows], one.scores, *self.routing(one))
        for out, expected in zip(outs, right, strict=True):
            assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)
        if back and not one.passed_back:
            self.go_back(one, outs, right)

    def go_back(self, one, outs, right):
        leaves = [*one.xs, *one.scores]
        ours = torch.autograd.grad(torch.cat(outs).square().sum(), leaves)
        theirs = torch.autograd.grad(torch.cat(right).square().sum(), leaves)
        one.passed_back = True
        self.exchanges["combine_backward"] += 1
        for grad, expected in zip(ours, theirs, strict=True):
            assert torch.allclose(grad, expected, rtol=1e-10, atol=1e-10)

    @rule(one=dispatches)
    def dispatch_again(self, one):
        if one is None or not self.current(one) or one.lane in self.busy:
            return
        with torch.no_grad():
            rows = self.world.dispatch_again([x + 1 for x in one.xs], one.handles)
        self.exchanges["dispatch_again"] += 1
        right, _ = reference.dispatch([x + 1 for x in one.xs], *self.routing(one))
        assert all(torch.equal(a, b) for a, b in zip(rows, right, strict=True))

    @rule(what=st.sampled_from(MISTAKES), rank=st.integers(0, W - 1))
    def mistake(self, what, rank):
        xs, scores, ids = self.draw((2, 2, 2))
        # In a busy lane one rank may notice that before another notices its mistake.
        lane = next((lane for lane in range(LANES) if lane not in self.busy), None)
        if lane is None:
            return
        if what == "rows":
            xs[rank] = xs[rank][:, 1:]
        elif what == "dtype":
            xs[rank] = xs[rank].float()
        elif what == "tokens":
            xs[rank], scores[rank], ids[rank] = (
                torch.cat([t] * C) for t in (xs[rank], scores[rank], ids[rank])
            )
        elif what == "ids":
            ids[rank] = ids[rank].float()
        elif what == "lane":
            lane = LANES
        else:
            xs = xs[1:]
        with pytest.raises(symm_a2a.InputError, match=r"expected .*, got"):
            self.world.dispatch(xs, scores, ids, lane=lane)

    @precondition(lambda self: not self.busy)
    @rule(rank=st.integers(0, W - 1), bad=st.sampled_from([E, -2, 2**40]))
    def id_out_of_range(self, rank, bad):
        xs, scores, ids = self.draw((2, 2, 2))
        ids[rank][1, 0] = bad
        with pytest.raises(symm_a2a.ExpertIdError, match="got 1 slots out of range"):
            self.world.dispatch(xs, scores, ids, lane=0)
        self.exchanges["dispatch"] += 1

    @invariant()
    def results_stay_what_they_were(self):
        for one in self.latest:
            assert all(torch.equal(a, b) for a, b in zip(one.rows, one.kept, strict=True))

    @invariant()
    def every_exchange_is_counted(self):
        if self.busy:
            return
        for dispatcher in self.world.dispatchers:
            found = dispatcher.stats().exchanges
            assert {name: found[name] for name in self.exchanges} == self.exchanges

    def teardown(self):
        self.world.close()


World.TestCase.settings = settings(max_examples=examples(4), stateful_step_count=15, deadline=None)
TestWorld = World.TestCase
