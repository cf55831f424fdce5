"""What a caller may do wrong, and what it is told; a group of one."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import symm_a2a
from symm_a2a import EPConfig, SymmTokenDispatcher
from symm_a2a.kernels.channel import Channel
from symm_a2a.layout import FLAGS

T, E, K, D, C = 5, 4, 2, 6, 8


def config(**changes):
    fields = dict(num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=C, dtype=torch.float32)
    return EPConfig(**(fields | changes))


def arguments(tokens=T):
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(E, (tokens, K), generator=gen)
    return torch.randn(tokens, D, generator=gen), torch.rand(tokens, K, generator=gen), ids


@pytest.fixture
def dispatcher():
    with SymmTokenDispatcher(config(), device="cpu") as d:
        yield d


def untouched(d) -> bool:
    return all(not lane.channel.local[flag].any() for lane in d.arena.lanes for flag in FLAGS)


@pytest.mark.parametrize("method", ["dispatch", "dispatch_async"])
@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (0, torch.zeros(T, D + 1), r"x_TD of shape \(T, 6\), got \(5, 7\)"),
        (0, torch.zeros(T, D, dtype=torch.bfloat16), "dtype torch.float32, got torch.bfloat16"),
        (0, torch.zeros(T, D, device="meta"), "x_TD on cpu, got meta"),
        (1, torch.zeros(T, K + 1), r"scores_TK of shape \(5, 2\), got \(5, 3\)"),
        (1, torch.zeros(T, K, dtype=torch.int32), "floating point"),
        (2, torch.zeros(T - 1, K, dtype=torch.int64), r"topk_ids_TK of shape \(5, 2\), got \(4, 2\)"),
        (2, torch.zeros(T, K, dtype=torch.int16), "int32 or int64"),
    ],
)
def test_a_wrong_argument_is_named_before_any_memory_is_touched(dispatcher, method, place, wrong, message):
    args = list(arguments())
    args[place] = wrong
    with pytest.raises(symm_a2a.InputError, match=message):
        getattr(dispatcher, method)(*args)
    assert untouched(dispatcher)


def test_more_tokens_than_the_capacity_name_both_numbers(dispatcher):
    with pytest.raises(symm_a2a.InputError, match="8 tokens, got 9"):
        dispatcher.dispatch(*arguments(tokens=C + 1))
    assert untouched(dispatcher)
    rows, _, _ = dispatcher.dispatch(*arguments(tokens=C))
    assert rows.shape == (C * K, D)


def test_combine_wants_as_many_rows_as_were_dispatched(dispatcher):
    rows, _, handle = dispatcher.dispatch(*arguments())
    with pytest.raises(symm_a2a.InputError, match=r"y_RD of shape \(10, 6\), got \(9, 6\)"):
        dispatcher.combine(rows[1:], handle)
    with pytest.raises(symm_a2a.InputError, match="handle of a dispatch, got NoneType"):
        dispatcher.combine(rows, None)


@pytest.mark.parametrize("lane", [-1, 2])
def test_a_lane_that_is_not_there(dispatcher, lane):
    for method in (dispatcher.dispatch, dispatcher.dispatch_async):
        with pytest.raises(symm_a2a.InputError, match=r"lane in \[0, 2\)"):
            method(*arguments(), lane=lane)


def test_a_busy_lane_refuses_a_launch_and_the_other_lane_does_not(dispatcher):
    pending = dispatcher.dispatch_async(*arguments())
    for method in (dispatcher.dispatch, dispatcher.dispatch_async):
        with pytest.raises(
            symm_a2a.LaneBusyError, match="lane 0 to be idle, got a launch of dispatch while dispatch"
        ):
            method(*arguments())
    other, _, _ = dispatcher.dispatch(*arguments(), lane=1)
    rows, _, handle = pending.join()
    assert torch.equal(rows, other)
    combining = dispatcher.combine_async(rows, handle)
    with pytest.raises(symm_a2a.LaneBusyError, match="combine is in flight"):
        dispatcher.combine(rows, handle)
    combining.join()


def test_a_pending_exchange_is_joined_once(dispatcher):
    pending = dispatcher.dispatch_async(*arguments())
    rows, _, handle = pending.join()
    combining = dispatcher.combine_async(rows, handle)
    combining.join()
    for joined in (pending, combining):
        with pytest.raises(symm_a2a.JoinedTwiceError, match="joined before"):
            joined.join()


def test_use_after_close():
    d = SymmTokenDispatcher(config(), device="cpu")
    sibling = SymmTokenDispatcher(config(capacity=20, pad_multiple=2), arena=d.arena)
    rows, _, handle = d.dispatch(*arguments())
    sibling.close()
    d.combine(rows, handle)
    with pytest.raises(symm_a2a.ClosedError):
        sibling.dispatch(*arguments())
    d.close()
    d.close()
    for use in (lambda: d.dispatch(*arguments()), lambda: d.combine(rows, handle), lambda: d.warmup()):
        with pytest.raises(symm_a2a.ClosedError):
            use()
    with pytest.raises(symm_a2a.ClosedError):
        SymmTokenDispatcher(config(), arena=d.arena)


def test_a_backward_after_close_is_an_error_not_a_crash():
    d = SymmTokenDispatcher(config(), device="cpu")
    x, scores, ids = arguments()
    rows, _, handle = d.dispatch(x.requires_grad_(), scores, ids)
    out = d.combine(rows, handle)
    d.close()
    with pytest.raises(symm_a2a.ClosedError):
        out.sum().backward()


def test_a_shared_arena_wants_the_same_sizes(dispatcher):
    with pytest.raises(symm_a2a.ConfigError, match="hidden_dim 6 in the arena and 7 in the config"):
        SymmTokenDispatcher(config(hidden_dim=7), arena=dispatcher.arena)
    with pytest.raises(symm_a2a.ConfigError, match="arena= alone"):
        SymmTokenDispatcher(config(), arena=dispatcher.arena, device="cpu")
    lanes = [lane.number for lane in dispatcher.arena.lanes]
    sibling = SymmTokenDispatcher(config(capacity=30), arena=dispatcher.arena)
    assert [lane.number for lane in sibling.arena.lanes] == lanes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu", "backend": "cuda"}, "'cuda' expects a cuda device, got cpu"),
        ({"device": "cpu", "backend": "nvshmem"}, 'backend "cuda", "host" or "virtual"'),
        ({"device": "meta"}, "cuda or cpu device, got meta"),
        pytest.param(
            {"device": "cuda"},
            "a CUDA device to be there",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_a_backend_that_cannot_work_says_why(options, message):
    with pytest.raises(symm_a2a.EnvironmentUnsupportedError, match=message):
        SymmTokenDispatcher(config(), **options)


def test_a_closed_dispatcher_is_not_entered_again():
    dispatcher = SymmTokenDispatcher(config(), device="cpu")
    with dispatcher:
        pass
    with pytest.raises(symm_a2a.ClosedError, match="expected an open dispatcher"), dispatcher:
        raise AssertionError("entered")


def test_warmup_launches_all_that_a_later_call_does(monkeypatch):
    """Small messages and large ones are counted by other kernels."""
    cfg = symm_a2a.EPConfig(
        num_experts=4, top_k=2, hidden_dim=4, max_tokens_per_rank=200, dtype=torch.float32, capacity=900
    )
    with symm_a2a.SymmTokenDispatcher(cfg, device="cpu") as dispatcher:
        forms = set()
        launch = Channel.launch

        def launched(self, kernel, *args):
            def call(*given, **options):
                forms.add(
                    (
                        kernel.__name__,
                        *(
                            options.get(name)
                            for name in ("KIND", "COUNTS_TOO", "PLACE", "HAS_SCORES", "HAS_COUNTS")
                        ),
                    )
                )
                return launch(self, kernel, *args)(*given, **options)

            return call

        monkeypatch.setattr(Channel, "launch", launched)
        dispatcher.warmup()
        warm = set(forms)
        for tokens in (3, 150):
            x = torch.randn(tokens, 4, requires_grad=True)
            rows, _, handle = dispatcher.dispatch(x, torch.rand(tokens, 2), torch.randint(4, (tokens, 2)))
            dispatcher.combine(rows, handle).sum().backward()
            dispatcher.dispatch(x, torch.rand(tokens, 2), torch.randint(4, (tokens, 2)))[0].sum().backward()
        dispatcher.broadcast_counts(torch.randint(4, (3, 2)))
        dispatcher.barrier()
        assert warm
        assert forms == warm


def test_warmup_uses_every_lane_in_both_directions(dispatcher):
    dispatcher.warmup()
    for lane in dispatcher.arena.lanes:
        # A barrier, counts; a dispatch, a combine and a second dispatch, forward and backward; a dispatch and
        # its backward.
        assert lane.channel.state[:4].tolist() == [6, 6, 4, 4]


def test_memory_goes_with_the_dispatcher():
    d = SymmTokenDispatcher(config(), device="cpu")
    d.dispatch(*arguments())
    arena, lane = weakref.ref(d.arena), weakref.ref(d.arena.lanes[0])
    del d
    gc.collect()
    assert arena() is None
    assert lane() is None


def test_trainers_extra_arguments_are_accepted(dispatcher):
    x, scores, ids = arguments()
    counts = torch.bincount(ids.flatten(), minlength=E)
    rows, tokens_per_expert, handle = dispatcher.dispatch(x, scores, ids, counts)
    assert torch.equal(tokens_per_expert.long(), counts)
    torch.testing.assert_close(dispatcher.combine(rows, handle, x), x * scores.sum(1, keepdim=True))


def test_a_failed_dispatcher_refuses_work_with_the_same_error():
    cfg = config(num_experts=4)
    with symm_a2a.VirtualWorld(cfg, 2, "cpu") as world:
        lonely = world.dispatchers[0]
        with pytest.raises(
            symm_a2a.ExchangeError, match="rank 0 waited for its counts in dispatch, lane 0, epoch 1"
        ):
            lonely.dispatch(*arguments())
        with pytest.raises(
            symm_a2a.ExchangeError, match="rank 0 waited for its counts in dispatch, lane 0, epoch 1"
        ):
            lonely.dispatch(*arguments(), lane=1)
        aborted = world.dispatchers[1].arena.lanes[0].channel.abort_W
        assert aborted.tolist() == [1, 0]


class Activation:
    """What a caller holds in a frame that an error passes through."""


def fails_in_a_frame(dispatcher):
    held = Activation()
    seen = weakref.ref(held)
    try:
        dispatcher.dispatch(*arguments())
    except symm_a2a.ExchangeError:
        return seen
    raise AssertionError("expected an exchange without peers to fail")


def test_a_failed_dispatcher_keeps_nothing_of_the_frames_its_errors_passed_through():
    with symm_a2a.VirtualWorld(config(num_experts=4), 2, "cpu") as world:
        first, later = (fails_in_a_frame(world.dispatchers[0]) for _ in range(2))
        gc.collect()
        assert first() is None
        assert later() is None


def test_a_handle_of_another_arena_is_refused(dispatcher):
    with SymmTokenDispatcher(config(max_tokens_per_rank=4 * C), device="cpu") as other:
        rows, _, handle = other.dispatch(*arguments())
        for method in (dispatcher.combine, dispatcher.combine_async):
            with pytest.raises(symm_a2a.InputError, match="handle of this arena"):
                method(rows, handle)
    assert untouched(dispatcher)


def test_copies_of_a_model_share_the_dispatcher_and_pickles_are_refused(dispatcher):
    assert copy.deepcopy({"layer": dispatcher})["layer"] is dispatcher
    with pytest.raises(TypeError, match="no pickling of a SymmTokenDispatcher"):
        pickle.dumps(dispatcher)


def test_rows_changed_in_place_between_launch_and_join_are_noticed(dispatcher):
    rows, _, handle = dispatcher.dispatch(*arguments())
    y = rows.clone()
    pending = dispatcher.combine_async(y, handle)
    y.mul_(0)
    with pytest.raises(symm_a2a.InputError, match="changed in place before the join"):
        pending.join()
    dispatcher.combine(rows, handle)  # The lane is idle, not lost.


@pytest.mark.parametrize("asynchronous", [True, False])
def test_rows_and_counts_may_be_changed_in_place(dispatcher, asynchronous):
    grads = []
    for inplace in (True, False):
        x, scores, ids = arguments()
        x.requires_grad_()
        if asynchronous:
            rows, counts, handle = dispatcher.dispatch_async(x, scores, ids).join()
        else:
            rows, counts, handle = dispatcher.dispatch(x, scores, ids)
        if inplace:
            counts.clamp_(min=1)
        hidden = torch.nn.functional.relu(rows, inplace=inplace)
        (dispatcher.combine(hidden, handle) ** 2).sum().backward()
        grads.append(x.grad)
    assert grads[0].any()
    assert torch.equal(*grads)


def test_an_unused_result_still_has_a_gradient(dispatcher):
    x, scores, ids = arguments()
    x.requires_grad_()
    rows, _, handle = dispatcher.dispatch(x, scores.requires_grad_(), ids)
    dispatcher.combine(torch.ones_like(rows), handle).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    torch.testing.assert_close(scores.grad, torch.full_like(scores, float(D)))


def test_a_second_derivative_is_refused_in_both_forms(dispatcher):
    x, scores, ids = arguments()
    x.requires_grad_()
    rows, _, handle = dispatcher.dispatch(x, scores, ids)
    loss = (dispatcher.combine(rows, handle) ** 2).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad.sum().backward()
    rows, _, handle = dispatcher.dispatch_async(x, scores, ids).join()
    loss = (dispatcher.combine_async(rows, handle).join() ** 2).sum()
    with pytest.raises(symm_a2a.DoubleBackwardError):
        torch.autograd.grad(loss, x, create_graph=True)


def test_the_asynchronous_forms_are_refused_in_compiled_code(dispatcher):
    def layer(x, scores, ids):
        rows, _, handle = dispatcher.dispatch_async(x, scores, ids).join()
        return dispatcher.combine(rows, handle)

    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"eager mode|dispatch_async"):
        torch.compile(layer, backend="eager", fullgraph=True)(*arguments())


@pytest.mark.parametrize("lane", [True, 0.5, "0", 2])
def test_a_lane_is_an_int(dispatcher, lane):
    with pytest.raises(symm_a2a.InputError, match="expected a lane in"):
        dispatcher.dispatch(*arguments(), lane=lane)


def test_a_dispatcher_in_place_of_its_arena(dispatcher):
    with pytest.raises(symm_a2a.ConfigError, match="arena of a dispatcher, got SymmTokenDispatcher"):
        SymmTokenDispatcher(config(), arena=dispatcher)


def test_an_infinite_score_of_a_dropped_slot_reaches_nothing():
    """The first slot's expert has no room, the second's has; K = 3 adds a masked one."""
    cfg = EPConfig(
        num_experts=2, top_k=3, hidden_dim=D, max_tokens_per_rank=1, dtype=torch.float32, capacity=1,
        overflow="drop",
    )  # fmt: skip
    with SymmTokenDispatcher(cfg, device="cpu") as dispatcher:
        x = torch.randn(1, D, requires_grad=True)
        scores = torch.tensor([[torch.inf, 0.5, torch.inf]], requires_grad=True)
        rows, _, handle = dispatcher.dispatch(x, scores, torch.tensor([[1, 0, -1]]))
        out = dispatcher.combine(rows, handle)
        assert torch.equal(out, 0.5 * x)
        out.sum().backward()
        assert torch.equal(x.grad, torch.full((1, D), 0.5))
        torch.testing.assert_close(scores.grad, torch.tensor([[0.0, float(x.detach().sum()), 0.0]]))
        assert dispatcher.dropped_rows == 1
