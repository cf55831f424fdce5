"""A second dispatch with the routing of a first: other rows of the same tokens, in the same places."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import symm_a2a
from symm_a2a import VirtualWorld, reference
from symm_a2a.testing import OpGuard, run_ranks
from tests.cases import Case, apply_experts, cases, examples, placements_of, use_small_blocks

CASE = Case(
    num_local_experts=2, top_k=3, hidden_dim=5, tokens=(7, 0, 4), skew="none", masked=0.2,
    ids_dtype=torch.int64, pad_multiple=1, seed=5,
)  # fmt: skip


@st.composite
def placed_cases(draw):
    case = draw(cases(max_ranks=4))
    placements = st.one_of(st.none(), placements_of(case.world_size, case.num_experts))
    return case, draw(placements)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@settings(max_examples=examples(5))
@given(
    placed_cases(),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    st.sampled_from(["exact", 1, 7, 200]),
    st.booleans(),
    st.booleans(),
)
def test_rows_are_those_of_a_first_dispatch(device, placed, dtype, capacity, small, asynchronous):
    case, placement = placed
    cfg = case.config(dtype=dtype, capacity=case.whole(capacity), overflow="drop", placement=placement)
    parts = case.ids(), case.scores(torch.float32), case.xs(dtype), case.xs(dtype, step=1)
    ids, scores, xs, others = ([t.to(device) for t in part] for part in parts)
    with VirtualWorld(cfg, case.world_size, device) as world:
        if small:
            use_small_blocks(world)
        _, _, handles = world.dispatch(xs, scores, ids)
        if asynchronous:
            rows = world.dispatch_again_async(others, handles).join()
        else:
            rows = world.dispatch_again([x.t().contiguous().t() for x in others], handles)
        kept = [r.clone() for r in rows]
        expected, _, _ = world.dispatch(others, scores, ids)
        for rank in range(case.world_size):
            assert torch.equal(kept[rank], expected[rank])
            # What was given stays what it is: no later exchange writes there.
            assert torch.equal(rows[rank], kept[rank])
        for dispatcher in world.dispatchers:
            found = dispatcher.stats()
            assert found.copies["dispatch_again"] == [n // 2 for n in found.copies["dispatch"]]
            assert found.exchanges["dispatch_again"] == 1


@settings(max_examples=examples(4))
@given(cases(max_ranks=4, max_hidden=9), st.sampled_from(["exact", 9, 100]))
def test_gradients_are_the_oracles(case, capacity):
    """Of both dispatches' tokens, of scores and weights; experts take the rows of both."""
    capacity = case.whole(capacity)
    cfg = case.config(dtype=torch.float64, capacity=capacity, overflow="drop")
    ids, route = case.ids(), (case.num_experts, case.pad_multiple, capacity)
    D, L = case.hidden_dim, case.num_local_experts
    gen = torch.Generator().manual_seed(case.seed)
    whole = torch.randn(case.world_size, L, D, D, generator=gen, dtype=torch.float64)

    def leaves():
        parts = (case.xs(torch.float64), case.xs(torch.float64, 1), case.scores(torch.float64), list(whole))
        return [[t.clone().requires_grad_() for t in part] for part in parts]

    def loss(outs):
        return sum((out**2).sum() for out in outs)

    def layer(rows, others, counts, weights):
        ys = [apply_experts(r, c, w) for r, c, w in zip(rows, counts, weights, strict=True)]
        return [y + torch.sin(other) for y, other in zip(ys, others, strict=True)]

    with VirtualWorld(cfg, case.world_size, "cpu") as world:
        ours = leaves()
        rows, counts, handles = world.dispatch(ours[0], ours[2], ids)
        others = world.dispatch_again(ours[1], handles)
        loss(world.combine(layer(rows, others, counts, ours[3]), handles)).backward()
    theirs = leaves()
    rows, counts = reference.dispatch(theirs[0], ids, *route)
    others, _ = reference.dispatch(theirs[1], ids, *route)
    loss(reference.combine(layer(rows, others, counts, theirs[3]), theirs[2], ids, *route)).backward()
    for mine, expected in zip(chain(*ours), chain(*theirs), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("capacity", ["exact", 64])
def test_it_takes_two_launches_and_no_wait(capacity):
    cfg = symm_a2a.EPConfig(
        num_experts=4, top_k=2, hidden_dim=6, max_tokens_per_rank=300, dtype=torch.float32, capacity=capacity
    )
    with symm_a2a.SymmTokenDispatcher(cfg, device="cpu") as dispatcher, torch.no_grad():
        x, scores, ids = torch.randn(20, 6), torch.rand(20, 2), torch.randint(4, (20, 2))
        rows, _, handle = dispatcher.dispatch(x, scores, ids)
        before = dispatcher.stats()
        with OpGuard() as guard:
            again = dispatcher.dispatch_again(x, handle)
        used = dispatcher.stats() - before
        assert torch.equal(again, rows)
        assert (used.launches, used.host_syncs, guard.compute_ops.total()) == (2, 0, 0)
        # A row a copy, and a flag three times: no counts, no headers.
        assert used.payload_bytes_W == [20 * 6 * 4]
        assert used.metadata_bytes_W == [20 * 2 * 4 + 3 * 8]


def trained(rank, group, how):
    cfg = CASE.config(dtype=torch.float64, max_tokens_per_rank=8)
    xs, others, scores, ids = (
        CASE.xs(torch.float64),
        CASE.xs(torch.float64, 1),
        CASE.scores(torch.float64),
        CASE.ids(),
    )
    with symm_a2a.SymmTokenDispatcher(cfg, group) as dispatcher:
        x, other, score = (part[rank].clone().requires_grad_() for part in (xs, others, scores))

        def layer(x, other, score):
            rows, _, handle = dispatcher.dispatch(x, score, ids[rank])
            again = dispatcher.dispatch_again(other, handle)
            return dispatcher.combine(torch.tanh(rows) + again * rows, handle)

        def kept():
            return create_selective_checkpoint_contexts(symm_a2a.checkpoint_ops())

        run = {
            "plain": layer,
            "compiled": torch.compile(layer, fullgraph=True, backend="aot_eager"),
            "full": lambda *args: checkpoint(layer, *args, use_reentrant=False),
            "selective": lambda *args: checkpoint(layer, *args, use_reentrant=False, context_fn=kept),
        }[how]
        run(x, other, score).square().sum().backward()
        return x.grad, other.grad, score.grad, dispatcher.stats().exchanges


@pytest.mark.parametrize(("how", "repeats"), [("plain", 0), ("compiled", 0), ("full", 1), ("selective", 0)])
def test_over_processes_compiled_and_checkpointed(how, repeats):
    xs, others, scores = (
        [t.requires_grad_() for t in part]
        for part in (CASE.xs(torch.float64), CASE.xs(torch.float64, 1), CASE.scores(torch.float64))
    )
    route = (CASE.ids(), CASE.num_experts)
    rows, more = reference.dispatch(xs, *route)[0], reference.dispatch(others, *route)[0]
    ys = [torch.tanh(r) + m * r for r, m in zip(rows, more, strict=True)]
    sum(out.square().sum() for out in reference.combine(ys, scores, *route)).backward()
    for rank, (grad_x, grad_other, grad_score, exchanges) in enumerate(run_ranks(trained, 3, how)):
        for ours, theirs in ((grad_x, xs), (grad_other, others), (grad_score, scores)):
            torch.testing.assert_close(ours, theirs[rank].grad, rtol=0, atol=1e-12)
        assert (exchanges["dispatch_again"], exchanges["dispatch_again_backward"]) == (1 + repeats, 1)


def needs_gradients_alone(rank, group, how):
    cfg = CASE.config(dtype=torch.float64, max_tokens_per_rank=8, timeout=20)
    x, scores, ids = (part[rank] for part in (CASE.xs(torch.float64), CASE.scores(torch.float64), CASE.ids()))
    with symm_a2a.SymmTokenDispatcher(cfg, group) as dispatcher:
        with torch.no_grad():
            rows, _, handle = dispatcher.dispatch(x, scores, ids)
        again = {
            "again": lambda t: dispatcher.dispatch_again(t, handle),
            "again async": lambda t: dispatcher.dispatch_again_async(t, handle).join(),
            "combine": lambda t: dispatcher.combine(t, handle),
            "combine async": lambda t: dispatcher.combine_async(t, handle).join(),
        }[how.removesuffix(" compiled")]
        if how.endswith("compiled"):
            again = torch.compile(again, fullgraph=True, backend="aot_eager")
        given = (x if "again" in how else rows).clone().requires_grad_(rank == 1)
        again(given).sum().backward()
        found = dispatcher.stats().exchanges
        return found["dispatch_again_backward"] + found["combine_backward"]


@pytest.mark.parametrize(
    "how", ["again", "again async", "again compiled", "combine", "combine async", "combine compiled"]
)
def test_after_a_dispatch_without_gradients_the_backward_runs_on_every_rank(how):
    assert run_ranks(needs_gradients_alone, 3, how) == [1] * 3


def has_no_rows(rank, group, how):
    """Rows come to rank 0 alone; the other rank's experts return what depends on nothing."""
    cfg = symm_a2a.EPConfig(
        num_experts=2, top_k=1, hidden_dim=4, max_tokens_per_rank=4, dtype=torch.float64, timeout=8
    )
    gen = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 4, generator=gen, dtype=torch.float64).requires_grad_()
    scores, ids = torch.rand(4, 1, generator=gen), torch.zeros(4, 1, dtype=torch.int64)
    with symm_a2a.SymmTokenDispatcher(cfg, group) as dispatcher:

        def step(x):
            with torch.set_grad_enabled(how != "no_grad"):
                _, _, handle = dispatcher.dispatch(x, scores, ids)
            if how == "async":
                rows = dispatcher.dispatch_again_async(x * 2, handle).join()
            else:
                rows = dispatcher.dispatch_again(x * 2, handle)
            y = rows * 3 if rank == 0 else torch.zeros_like(rows)
            return dispatcher.combine(y, handle)

        if how == "checkpointed":
            out = checkpoint(step, x, use_reentrant=False)
        else:
            out = (
                torch.compile(step, fullgraph=True, backend="aot_eager")(x) if how == "compiled" else step(x)
            )
        out.sum().backward()
        dispatcher.barrier()
        assert torch.allclose(x.grad, 6 * scores.double().expand(4, 4))
        return dispatcher.stats().exchanges["dispatch_again_backward"]


@pytest.mark.parametrize("how", ["plain", "async", "no_grad", "compiled", "checkpointed"])
def test_where_no_rows_came_the_backward_runs_all_the_same(how):
    assert run_ranks(has_no_rows, 2, how) == [1, 1]


def test_what_was_dispatched_in_inference_mode_is_combined_without_gradients():
    cfg = CASE.config(dtype=torch.float64, max_tokens_per_rank=8)
    x, scores, ids = CASE.xs(torch.float64)[0], CASE.scores(torch.float64)[0], CASE.ids()[0]
    with symm_a2a.SymmTokenDispatcher(cfg, device="cpu") as dispatcher:
        with torch.inference_mode():
            rows, _, handle = dispatcher.dispatch(x, scores, ids)
            inside = dispatcher.combine(rows, handle), dispatcher.dispatch_again(x, handle)
        outside = dispatcher.combine(rows, handle), dispatcher.dispatch_again(x, handle)
        for one, other in zip(inside, outside, strict=True):
            assert torch.equal(one, other)
            assert not other.requires_grad


def leaves_unused(rank, group):
    cfg = CASE.config(dtype=torch.float64, max_tokens_per_rank=8, timeout=20)
    x, scores, ids = (part[rank] for part in (CASE.xs(torch.float64), CASE.scores(torch.float64), CASE.ids()))
    with symm_a2a.SymmTokenDispatcher(cfg, group) as dispatcher, torch.no_grad():
        _, _, handle = dispatcher.dispatch(x, scores, ids)

        @torch.compile(fullgraph=True, backend="aot_eager")
        def step(x):
            again = dispatcher.dispatch_again(x, handle)
            return again if rank == 0 else x

        step(x)
        return dispatcher.stats().exchanges["dispatch_again"]


def test_a_compiler_keeps_a_second_dispatch_that_a_rank_does_not_use():
    assert run_ranks(leaves_unused, 2) == [1, 1]


def disagrees(rank, group):
    cfg = CASE.config(dtype=torch.float64, max_tokens_per_rank=8, timeout=20)
    x, scores, ids = (part[0] for part in (CASE.xs(torch.float64), CASE.scores(torch.float64), CASE.ids()))
    with symm_a2a.SymmTokenDispatcher(cfg, group) as dispatcher:
        rows, _, handle = dispatcher.dispatch(x, scores, ids)
        out = dispatcher.combine(rows, handle)

        def go_apart():
            if rank == 0:
                dispatcher.dispatch_again(x, handle)
            else:
                out.sum().backward()

        with pytest.raises(symm_a2a.ExchangeError) as caught:
            go_apart()
        return str(caught.value)


def test_the_backward_of_a_combine_is_not_taken_for_it():
    """The same copies of the same dispatch are on their way, with other contents."""
    names = ("dispatch again", "combine backward")
    said = run_ranks(disagrees, 2)
    told = [rank for rank, text in enumerate(said) if "gave up before it took part" not in text]
    assert told
    for rank in told:
        assert f"expected every rank to run {names[rank]} in lane 0" in said[rank]
        assert f"got {names[1 - rank]} of dispatch 1 from peer {1 - rank}" in said[rank]


def test_what_does_not_fit_is_refused():
    sizes = dict(num_experts=2, top_k=1, hidden_dim=3, max_tokens_per_rank=4, dtype=torch.float32)
    cfg = symm_a2a.EPConfig(**sizes)
    with (
        symm_a2a.SymmTokenDispatcher(cfg, device="cpu") as dispatcher,
        symm_a2a.SymmTokenDispatcher(cfg, device="cpu") as other,
    ):
        x, scores, ids = torch.ones(2, 3), torch.ones(2, 1), torch.tensor([[0], [1]])
        rows, _, handle = dispatcher.dispatch(x, scores, ids)
        for call in (dispatcher.dispatch_again, dispatcher.dispatch_again_async):
            for wrong, message in (
                (torch.ones(3, 3), r"x_TD of shape \(2, 3\), got \(3, 3\)"),
                (torch.ones(2, 3).double(), "x_TD of dtype torch.float32, got torch.float64"),
                (torch.ones(2, 3, device="meta"), "x_TD on cpu, got meta"),
            ):
                with pytest.raises(symm_a2a.InputError, match=message):
                    call(wrong, handle)
            with pytest.raises(symm_a2a.InputError, match="the handle of a dispatch, got int"):
                call(x, 3)
        with pytest.raises(symm_a2a.InputError, match="another arena"):
            other.dispatch_again(x, handle)
        pending = dispatcher.dispatch_again_async(x, handle)
        with pytest.raises(symm_a2a.LaneBusyError, match="dispatch again is in flight"):
            dispatcher.combine(rows, handle)
        assert torch.equal(pending.join(), rows)
        with pytest.raises(symm_a2a.JoinedTwiceError):
            pending.join()
        held = dispatcher.dispatch_again_async(x, handle)
        x.zero_()
        with pytest.raises(symm_a2a.InputError, match="x_TD as it was when the dispatch was launched"):
            held.join()
    with pytest.raises(symm_a2a.ClosedError):
        dispatcher.dispatch_again(x, handle)
