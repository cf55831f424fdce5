"""The exchange against the oracle, all ranks in one process, any size and routing."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import symm_a2a
from symm_a2a import VirtualWorld, reference
from tests.cases import Case, cases, examples, model, reference_model, use_small_blocks

CASE = Case(
    num_local_experts=2, top_k=3, hidden_dim=5, tokens=(7, 0, 4), skew="none", masked=0.2,
    ids_dtype=torch.int64, pad_multiple=1, seed=5,
)  # fmt: skip
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def spread(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same values in memory that is not contiguous."""
    return [torch.stack([t, t], dim=-1)[..., 0] for t in tensors]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=examples(5))
@given(
    case=cases(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    capacity=st.sampled_from(["exact", 1, 7, 200]),
    contiguous=st.booleans(),
    small=st.booleans(),
)
def test_dispatch_moves_every_row_to_its_place(device, case, dtype, capacity, contiguous, small):
    ids, xs, capacity = case.ids(), case.xs(dtype), case.whole(capacity)
    scores = case.scores(torch.float32)
    cfg = case.config(dtype=dtype, capacity=capacity, overflow="drop")
    expected_rows, expected_counts = reference.dispatch(
        xs, ids, case.num_experts, case.pad_multiple, capacity
    )
    with VirtualWorld(cfg, case.world_size, device) as world:
        if small:
            use_small_blocks(world)
        for lane in (0, 1):
            inputs = [xs, scores, ids] if contiguous else [spread(xs), spread(scores), spread(ids)]
            inputs = [[t.to(device) for t in tensors] for tensors in inputs]
            rows, counts, handles = world.dispatch(*inputs, lane=lane)
            for rank in range(case.world_size):
                assert torch.equal(counts[rank].cpu(), expected_counts[rank])
                assert torch.equal(rows[rank].cpu(), expected_rows[rank])
            copies = torch.stack([handle.copies_sent_W.cpu() for handle in handles])
            assert torch.equal(copies.long(), reference.count_copies(ids, case.num_experts))


def leaves(tensors: list, device: str) -> list:
    return [t.to(device).requires_grad_() for t in tensors]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=examples(3))
@given(
    case=cases(max_ranks=5, max_tokens=9, max_hidden=20),
    capacity=st.sampled_from(["exact", 9, 100]),
    small=st.booleans(),
)
def test_outputs_and_all_gradients_equal_the_oracle(device, case, capacity, small):
    capacity = case.whole(capacity)
    cfg = case.config(dtype=torch.float64, capacity=capacity, overflow="drop")
    L, D = case.num_local_experts, case.hidden_dim
    with VirtualWorld(cfg, case.world_size, device) as world:
        if small:
            use_small_blocks(world)
        for step in range(2):
            ids, gen = case.ids(step), case.generator(step)
            results = []
            for run in ("symm", "oracle"):
                on = device if run == "symm" else "cpu"
                gen = case.generator(step)
                xs = leaves(case.xs(torch.float64, step), on)
                scores = leaves(case.scores(torch.float64, step), on)
                weights = [
                    leaves([torch.randn(L, D, D, generator=gen, dtype=torch.float64) for _ in xs], on)
                    for _ in range(2)
                ]
                if run == "symm":
                    device_ids = [i.to(device) for i in ids]
                    outs = model(
                        lambda rows, s=scores, i=device_ids: world.dispatch(rows, s, i),
                        lambda ys, _, handles: world.combine(ys, handles),
                        xs, scores, weights,
                    )  # fmt: skip
                else:
                    outs = reference_model(case, ids, xs, scores, weights, capacity)
                sum((out**2).sum() for out in outs).backward()
                grads = [t.grad for t in (*xs, *scores, *weights[0], *weights[1])]
                results.append([t.detach().cpu() for t in (*outs, *grads)])
            for ours, expected in zip(*results, strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_gradcheck_from_dispatch_to_combine(device):
    case = replace(CASE, top_k=2, hidden_dim=2, tokens=(2, 0, 1))
    ids = [i.to(device) for i in case.ids()]
    cfg = case.config(dtype=torch.float64, pad_multiple=2)
    W = case.world_size
    with VirtualWorld(cfg, W, device) as world:

        def exchange(*inputs):
            rows, _, handles = world.dispatch(inputs[:W], inputs[W:], ids)
            # Not linear, so that the rows' values matter to every gradient.
            return tuple(world.combine([row**2 for row in rows], handles))

        inputs = leaves([*case.xs(torch.float64), *case.scores(torch.float64)], device)
        assert torch.autograd.gradcheck(exchange, inputs, fast_mode=False)


def test_pad_rows_and_the_tail_are_zero_in_rows_and_gradients():
    cfg = CASE.config(dtype=torch.float32, pad_multiple=4, capacity=64)
    ids = CASE.ids()
    layout = reference.route(ids, CASE.num_experts, 4, 64)
    with VirtualWorld(cfg, CASE.world_size, "cpu") as world:
        xs = leaves(CASE.xs(torch.float32), "cpu")
        rows, _, handles = world.dispatch(xs, CASE.scores(torch.float32), ids)
        ys = [(row.detach() + 1).requires_grad_() for row in rows]
        sum((out**2).sum() for out in world.combine(ys, handles)).backward()
        for rank in range(CASE.world_size):
            empty = torch.ones(64, dtype=torch.bool)
            empty[: len(layout[rank].origin)] = layout[rank].origin < 0
            assert empty.any()
            assert (~empty).any()
            for tensor in (rows[rank].detach(), ys[rank].grad):
                assert not tensor[empty].any()
                assert tensor[~empty].any()


def test_a_handle_combines_twice_and_outlives_later_exchanges():
    ids, scores = CASE.ids(), CASE.scores(torch.float64)
    with VirtualWorld(CASE.config(dtype=torch.float64), CASE.world_size, "cpu") as world:
        xs = leaves(CASE.xs(torch.float64), "cpu")
        rows, _, handles = world.dispatch(xs, scores, ids)
        first = world.combine(rows, handles)
        world.dispatch([x.detach() * 0 for x in xs], scores, CASE.ids(step=1))
        second = world.combine([3 * row for row in rows], handles)
        for one, three in zip(first, second, strict=True):
            torch.testing.assert_close(3 * one, three, rtol=1e-14, atol=1e-14)
        sum(out.sum() for out in (*first, *second)).backward()
        for rank, x in enumerate(xs):
            weight = (scores[rank] * (ids[rank] >= 0)).sum(1, keepdim=True)
            torch.testing.assert_close(x.grad, 4 * weight.expand_as(x), rtol=1e-13, atol=1e-13)


def test_backward_twice_with_retain_graph():
    with VirtualWorld(CASE.config(dtype=torch.float64), CASE.world_size, "cpu") as world:
        xs = leaves(CASE.xs(torch.float64), "cpu")
        rows, _, handles = world.dispatch(xs, CASE.scores(torch.float64), CASE.ids())
        loss = sum((out**2).sum() for out in world.combine(rows, handles))
        loss.backward(retain_graph=True)
        once = [x.grad.clone() for x in xs]
        loss.backward()
        for x, grad in zip(xs, once, strict=True):
            assert torch.equal(x.grad, 2 * grad)


def test_double_backward_is_refused():
    with VirtualWorld(CASE.config(dtype=torch.float64), CASE.world_size, "cpu") as world:
        xs = leaves(CASE.xs(torch.float64), "cpu")
        rows, _, handles = world.dispatch(xs, CASE.scores(torch.float64), CASE.ids())
        out = sum((o**2).sum() for o in world.combine(rows, handles))
        with pytest.raises(symm_a2a.DoubleBackwardError, match="without create_graph"):
            torch.autograd.grad(out, xs[0], create_graph=True)


def test_overflow_is_raised_once_at_the_next_call():
    ids, xs, scores = CASE.ids(), CASE.xs(torch.float32), CASE.scores(torch.float32)
    dropped = [r.num_dropped for r in reference.route(ids, CASE.num_experts, 1, 3)]
    assert sum(dropped) > 0
    with VirtualWorld(CASE.config(dtype=torch.float32, capacity=3), CASE.world_size, "cpu") as world:
        rows, _, handles = world.dispatch(xs, scores, ids)
        assert [dispatcher.dropped_rows for dispatcher in world.dispatchers] == dropped
        for count in filter(None, dropped):
            with pytest.raises(symm_a2a.CapacityError, match=f"got {count} rows more"):
                world.combine(rows, handles)
        world.combine(rows, handles)


def test_overflow_of_the_last_call_is_raised_by_close():
    ids, xs, scores = CASE.ids(), CASE.xs(torch.float32), CASE.scores(torch.float32)
    world = VirtualWorld(CASE.config(dtype=torch.float32, capacity=3), CASE.world_size, "cpu")
    world.dispatch(xs, scores, ids, lane=1)
    with pytest.raises(symm_a2a.CapacityError, match="dropped"):
        world.close()
    assert all(dispatcher.arena.closed for dispatcher in world.dispatchers)


def test_overflow_is_only_counted_with_drop():
    ids, xs, scores = CASE.ids(), CASE.xs(torch.float32), CASE.scores(torch.float32)
    dropped = [r.num_dropped for r in reference.route(ids, CASE.num_experts, 1, 3)]
    cfg = CASE.config(dtype=torch.float32, capacity=3, overflow="drop")
    with VirtualWorld(cfg, CASE.world_size, "cpu") as world:
        for _ in range(2):
            world.dispatch(xs, scores, ids)
        assert [dispatcher.dropped_rows for dispatcher in world.dispatchers] == [2 * n for n in dropped]


@pytest.mark.parametrize("factor", [0.4, 4.0])
def test_a_capacity_factor_is_a_static_capacity(factor):
    """Rows as with the int that it stands for; with a factor of W or more none can be dropped."""
    case = replace(CASE, tokens=(9,) * CASE.world_size, skew="one_rank", masked=0.0, pad_multiple=4)
    ids, xs, scores = case.ids(), case.xs(torch.float32), case.scores(torch.float32)
    cfg = case.config(dtype=torch.float32, capacity=factor, overflow="drop")
    rows = cfg.capacity_rows(case.world_size)
    expected, counts = reference.dispatch(xs, ids, case.num_experts, 4, rows)
    with VirtualWorld(cfg, case.world_size, "cpu") as world:
        got, got_counts, handles = world.dispatch(xs, scores, ids)
        for rank in range(case.world_size):
            assert torch.equal(got[rank], expected[rank])
            assert torch.equal(got_counts[rank], counts[rank])
        assert any(dispatcher.dropped_rows for dispatcher in world.dispatchers) == (factor < 1)
        assert sum(dispatcher.stats().host_syncs for dispatcher in world.dispatchers) == 0
        world.combine(got, handles)


def test_a_mistake_leaves_the_world_usable():
    ids, xs, scores = CASE.ids(), CASE.xs(torch.float32), CASE.scores(torch.float32)
    bad_ids = [i.clone() for i in ids]
    bad_ids[2][0, 0] = 99
    with VirtualWorld(CASE.config(dtype=torch.float32), CASE.world_size, "cpu") as world:
        for arguments, error in (
            ((xs, scores, ids[:2]), symm_a2a.InputError),
            ((xs, scores, [*ids[:2], ids[0]]), symm_a2a.InputError),
            ((xs, scores, bad_ids), symm_a2a.ExpertIdError),
        ):
            with pytest.raises(error):
                world.dispatch(*arguments)
        rows, _, handles = world.dispatch(xs, scores, ids)
        with pytest.raises(symm_a2a.InputError, match="ys of 3 ranks, got 2"):
            world.combine(rows[:2], handles)
        world.combine(rows, handles)


@pytest.mark.parametrize("bad", [6, -2, 2**32 + 1])
def test_an_id_out_of_range_is_masked_and_raised(bad):
    ids, xs, scores = CASE.ids(), CASE.xs(torch.float32), CASE.scores(torch.float32)
    ids[0][1, 2] = bad
    with VirtualWorld(CASE.config(dtype=torch.float32), CASE.world_size, "cpu") as world:
        with pytest.raises(symm_a2a.ExpertIdError, match=r"in \[-1, 6\), got 1 slots"):
            world.dispatch(xs, scores, ids)
        ids[0][1, 2] = -1
        dispatcher = world.dispatchers[0]
        sections = dispatcher.arena.lanes[0].channel.local["counts"]
        sent = torch.bincount(ids[0][ids[0] >= 0], minlength=CASE.num_experts)
        assert torch.equal(sections[0, : CASE.num_experts].long(), sent)


def test_results_do_not_alias_the_arena():
    ids, xs, scores = CASE.ids(), CASE.xs(torch.float32), CASE.scores(torch.float32)
    with VirtualWorld(CASE.config(dtype=torch.float32), CASE.world_size, "cpu") as world:
        rows, counts, handles = world.dispatch(xs, scores, ids)
        outs = world.combine(rows, handles)
        before = [t.clone() for t in (*rows, *counts, *outs)]
        for dispatcher in world.dispatchers:
            dispatcher.arena.memory.arenas[dispatcher.rank].fill_(0x5A)
        for tensor, copy in zip((*rows, *counts, *outs), before, strict=True):
            assert torch.equal(tensor, copy)


def test_nan_and_inf_stay_in_their_rows():
    xs, ids = CASE.xs(torch.float32), CASE.ids()
    xs[0][2] = float("nan")
    xs[2][1] = float("inf")
    scores = CASE.scores(torch.float32)
    expected, _ = reference.dispatch(xs, ids, CASE.num_experts)
    with VirtualWorld(CASE.config(dtype=torch.float32), CASE.world_size, "cpu") as world:
        rows, _, handles = world.dispatch(xs, scores, ids)
        outs = world.combine(rows, handles)
    for ours, theirs in zip(rows, expected, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.isinf(), theirs.isinf())
    for rank, out in enumerate(outs):
        bad = ~xs[rank].isfinite() & (ids[rank] >= 0).any(1, keepdim=True)
        assert torch.equal(~out.isfinite(), bad)
