"""Ranks as processes over shared memory: against the baseline, in groups, and when peers fail."""

import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import symm_a2a
from symm_a2a import SymmTokenDispatcher
from symm_a2a.baselines import AllToAllTokenDispatcher
from symm_a2a.testing import RankError, run_ranks
from tests.cases import apply_experts

E, K, D, C = 8, 3, 33, 24
BOTH = [
    pytest.param("cpu", id="host"),
    pytest.param("cuda", id="cuda", marks=pytest.mark.multigpu),
]


def config(**changes):
    fields = dict(
        num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=C, dtype=torch.float32, timeout=20
    )
    return symm_a2a.EPConfig(**(fields | changes))


def device_of(group) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def inputs(rank, step, dtype, device, tokens=None):
    gen = torch.Generator().manual_seed(1000 * step + rank)
    T = int(torch.randint(0, C + 1, (), generator=gen)) if tokens is None else tokens
    x = torch.randn(T, D, generator=gen, dtype=torch.float64)
    scores = torch.rand(T, K, generator=gen)
    ids = torch.randint(-1, E, (T, K), generator=gen)
    return x.to(dtype).to(device), scores.to(device), ids.to(device)


def weights(rank, world_size, dtype, device):
    gen = torch.Generator().manual_seed(7)
    every = torch.randn(E, D, D, generator=gen, dtype=torch.float64) / D**0.5
    local = E // world_size
    return every[rank * local : (rank + 1) * local].to(dtype).to(device)


def forward_backward(dispatcher, x, scores, ids, weight, lane=None):
    x, scores, weight = (t.clone().requires_grad_() for t in (x, scores, weight))
    if lane is None:
        rows, counts, handle = dispatcher.dispatch(x, scores, ids)
        out = dispatcher.combine(apply_experts(rows, counts, weight), handle)
    else:
        rows, counts, handle = dispatcher.dispatch_async(x, scores, ids, lane=lane).join()
        out = dispatcher.combine_async(apply_experts(rows, counts, weight), handle).join()
    (out.double() ** 2).sum().backward()
    return [t.detach() for t in (rows, counts, out, x.grad, scores.grad, weight.grad)]


def against_the_baseline(rank, group, dtype):
    device = device_of(group)
    weight = weights(rank, dist.get_world_size(group), dtype, device)
    ours = SymmTokenDispatcher(config(dtype=dtype), group)
    theirs = AllToAllTokenDispatcher(config(dtype=dtype), group)
    for step in range(6):
        x, scores, ids = inputs(rank, step, dtype, device)
        time.sleep(0.05 * float(torch.rand((), generator=torch.Generator().manual_seed(97 * step + rank))))
        mine = forward_backward(ours, x, scores, ids, weight, lane=(None, 0, 1)[step % 3])
        base = forward_backward(theirs, x, scores, ids, weight)
        assert torch.equal(mine[0], base[0])
        assert torch.equal(mine[1], base[1])
        close = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=0.05, atol=0.1)
        torch.testing.assert_close(mine[2:], base[2:], **close)
    ours.close()
    theirs.close()
    return True


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_all_to_all_baseline(device, dtype):
    ranks = 4 if device == "cpu" else min(4, torch.cuda.device_count())
    assert all(run_ranks(against_the_baseline, ranks, dtype, device=device))


def rounding_errors(rank, group):
    """Errors of bfloat16 sums over slots: [combine, dispatch backward] by [ours, steps, once].

    `steps` is the standard path of GPU trainers: every product rounded, then added in bfloat16,
    rounded again. `once` is the standard path as PyTorch runs it on a CPU, where `index_add`
    rounds the sum once: our baseline there.
    """
    device, low = device_of(group), torch.bfloat16
    exact = SymmTokenDispatcher(config(dtype=torch.float64), group)
    ours = SymmTokenDispatcher(config(dtype=low), group)
    base = AllToAllTokenDispatcher(config(dtype=low), group)
    squares = torch.zeros(2, 3, dtype=torch.float64)
    for step in range(2):
        x, scores, ids = inputs(rank, step, low, device, tokens=C)

        def of_slot(rows, k, ids=ids):
            """What each token's k-th slot has among the rows, exactly; zeros where masked."""
            pick = torch.nn.functional.one_hot(torch.tensor(k), K).expand(C, K).double().to(device)
            _, _, handle = exact.dispatch(torch.zeros(C, D, dtype=torch.float64, device=device), pick, ids)
            return exact.combine(rows.double(), handle)

        results = []
        for dispatcher in (ours, base):
            leaf = x.clone().requires_grad_()
            rows, _, handle = dispatcher.dispatch(leaf, scores, ids)
            gen = torch.Generator().manual_seed(step)
            y = torch.randn(rows.shape, generator=gen).to(low).to(device)
            out = dispatcher.combine(y, handle)
            rows.backward(y)
            results.append((out, leaf.grad))
        for i, weight in enumerate((scores, torch.ones_like(scores))):
            parts = [of_slot(y, k) * weight[:, k : k + 1].double() for k in range(K)]
            truth, steps = sum(parts), torch.zeros_like(x)
            for part in parts:
                steps = steps + part.float().to(low)
            for j, result in enumerate((results[0][i], steps, results[1][i])):
                squares[i, j] += ((result.double() - truth) ** 2).sum().cpu()
    return squares


@pytest.mark.parametrize("device", BOTH)
def test_bfloat16_errors_against_the_standard_path(device):
    ranks = 4 if device == "cpu" else min(4, torch.cuda.device_count())
    errors = sum(run_ranks(rounding_errors, ranks, device=device)).sqrt()
    ours, steps, baseline = errors.T
    assert (ours <= steps).all(), errors
    # Sums over slots are rounded once a rank and once more, a CPU's `index_add` rounds once.
    assert ours[0] <= 1.05 * baseline[0], errors
    assert ours[1] <= 1.35 * baseline[1], errors


def two_groups(rank, group):
    device = device_of(group)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[rank // 2]
    place = dist.get_rank(mine)
    with SymmTokenDispatcher(config(), mine) as d, AllToAllTokenDispatcher(config(), mine) as base:
        for step in range(3):
            x, scores, ids = inputs(rank, step, torch.float32, device)
            weight = weights(place, 2, torch.float32, device)
            ours = forward_backward(d, x, scores, ids, weight)
            theirs = forward_backward(base, x, scores, ids, weight)
            assert torch.equal(ours[0], theirs[0])
            torch.testing.assert_close(ours[2:], theirs[2:], rtol=1e-4, atol=1e-4)
    return True


@pytest.mark.parametrize("device", BOTH)
def test_two_groups_at_once(device):
    if device == "cuda" and torch.cuda.device_count() < 4:
        pytest.skip("needs 4 CUDA devices")
    assert run_ranks(two_groups, 4, device=device) == [True] * 4


def segments() -> list[str]:
    """This rank's segments that still have a name."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"symm_a2a-{os.getpid()}-")]


def create_and_close(rank, group):
    descriptors = len(os.listdir("/proc/self/fd"))
    for step in range(50):
        with SymmTokenDispatcher(config(), group) as dispatcher:
            if step % 10 == 0:
                x, scores, ids = inputs(rank, step, torch.float32, "cpu")
                dispatcher.combine(
                    dispatcher.dispatch(x, scores, ids)[0], dispatcher.dispatch(x, scores, ids)[2]
                )
    gc.collect()  # The interpreter leaves cycles that hold kernel arguments.
    with open("/proc/self/maps") as maps:
        mappings = sum("/dev/shm/symm_a2a" in line for line in maps)
    return len(os.listdir("/proc/self/fd")) - descriptors, mappings, segments()


def test_fifty_times_create_and_close_leave_nothing():
    assert run_ranks(create_and_close, 2) == [(0, 0, [])] * 2


def unnamed_while_open(rank, group):
    with SymmTokenDispatcher(config(), group):
        dist.barrier(group)
        found = segments()
        dist.barrier(group)
    return found


def test_a_segment_has_no_name_once_it_is_mapped():
    assert run_ranks(unnamed_while_open, 2) == [[], []]


def killed_peer(rank, group):
    dispatcher = SymmTokenDispatcher(config(), group)
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=5)
    rows, _, handle = dispatcher.dispatch(x, scores, ids, lane=1)
    dist.barrier(group)
    if rank == 2:
        pid = os.fork()
        if pid == 0:  # A child that maps the same memory must not keep the rank alive.
            time.sleep(30)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    errors = []
    for _ in range(2):
        try:
            dispatcher.combine(rows, handle)
        except symm_a2a.PeerLostError as error:
            errors.append(str(error))
    dispatcher.close()
    return errors, time.monotonic() - began


def test_a_killed_rank_ends_the_others_with_an_error_that_names_it(tmp_path):
    with pytest.raises(RankError, match="2"):
        run_ranks(killed_peer_recorded, 4, str(tmp_path))
    reports = sorted(tmp_path.iterdir())
    assert [r.name for r in reports] == ["0", "1", "3"]
    for report in reports:
        first, second, seconds = report.read_text().split("\n")
        assert "waited for" in first
        assert "combine, lane 1, epoch 1" in first
        assert "peer 2" in first or "gave up" in first
        assert second == first, "the dispatcher refuses further work with the same error"
        assert float(seconds) < 10, "well before the timeout: the peer's end is seen"


def killed_peer_recorded(rank, group, folder):
    errors, seconds = killed_peer(rank, group)
    with open(f"{folder}/{rank}", "w") as file:
        file.write("\n".join([*errors, str(seconds)]))


def late_peer(rank, group):
    dispatcher = SymmTokenDispatcher(config(timeout=0.5), group)
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=5)
    message = None
    if rank == 0:
        try:
            dispatcher.dispatch(x, scores, ids)
        except symm_a2a.PeerTimeoutError as error:
            message = str(error)
    dist.barrier(group)
    if rank == 1:
        try:
            dispatcher.dispatch(x, scores, ids)
            dispatcher.dispatch(x, scores, ids)
        except symm_a2a.PeerLostError as error:
            message = str(error)
    dist.barrier(group)
    dispatcher.close()
    return message


def test_a_late_peer_is_named_and_learns_that_it_was_given_up():
    late, gone = run_ranks(late_peer, 2)
    assert late == (
        "rank 0 waited for its counts in dispatch, lane 0, epoch 1, but peer 1 did not take part within 0.5 s"
    )
    # What rank 0 had sent is still good; what it will not send is not waited for.
    assert gone.endswith("but peer 0 gave up before it took part")


def fails_in_its_own_code(rank, group):
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=5)
    began = time.monotonic()
    try:
        with SymmTokenDispatcher(config(), group) as dispatcher:
            rows, _, handle = dispatcher.dispatch(x, scores, ids)
            if rank == 1:
                raise ZeroDivisionError("a bug of the caller's")
            dispatcher.combine(rows, handle)
    except (ZeroDivisionError, symm_a2a.PeerLostError) as error:
        return type(error).__name__, str(error), time.monotonic() - began


def test_an_exception_on_one_rank_ends_the_others_at_once():
    (lost, message, seconds), (own, _, _) = run_ranks(fails_in_its_own_code, 2)
    assert (lost, own) == ("PeerLostError", "ZeroDivisionError")
    assert message.endswith("in combine, lane 0, epoch 1, but peer 1 gave up before it took part")
    assert seconds < 10, "well before the timeout"


def skips_its_backward(rank, group, how):
    dispatcher = SymmTokenDispatcher(config(), group)
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=5)
    alone = rank == 1
    try:
        for _ in range(2):
            with torch.set_grad_enabled(not (alone and how == "no_grad")):
                rows, _, handle = dispatcher.dispatch(x, scores, ids)
                out = dispatcher.combine(rows, handle)
            if not alone:
                out.sum().backward()
            elif how == "ignored output":
                (rows.sum() * 0 + handle.token.sum()).backward()
    except symm_a2a.ExchangeError as error:
        return type(error).__name__, str(error)
    finally:
        dispatcher.close()


@pytest.mark.parametrize("how", ["skipped", "no_grad"])
def test_a_rank_without_a_backward_is_told_and_so_are_its_peers(how):
    results = run_ranks(skips_its_backward, 4, how)
    for rank, (kind, message) in enumerate(results):
        assert kind == "ExchangeMismatchError", (rank, message)
        assert "combine backward" in message
        assert "dispatch" in message
        mine = "dispatch" if rank == 1 else "combine backward"
        assert message.endswith("breaks that order")
        assert f"while rank {rank} runs {mine}." in message


def some_need_gradients(rank, group):
    """Inputs that need gradients on one rank only, scores that need none, weights of the experts."""
    device = device_of(group)
    weight = weights(rank, dist.get_world_size(group), torch.float64, device)
    results = []
    for dispatcher in (SymmTokenDispatcher(config(dtype=torch.float64), group), None):
        grads = []
        for x_needs, out_used in ((rank == 0, True), (False, rank != 1), (True, False)):
            x, scores, ids = inputs(rank, 3, torch.float64, device, tokens=6)
            scores = scores.double()
            local = weight.clone().requires_grad_()
            x = x.requires_grad_(x_needs)
            d = dispatcher or AllToAllTokenDispatcher(config(dtype=torch.float64), group)
            rows, counts, handle = d.dispatch(x, scores, ids)
            out = d.combine(apply_experts(rows, counts, local), handle)
            # A loss that ignores this rank's output still reaches it, with zeros.
            (out**2 * float(out_used)).sum().backward()
            grads += [local.grad, x.grad if x_needs else torch.zeros(())]
        results.append(grads)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    assert results[0][0].abs().sum() > 0
    return True


@pytest.mark.parametrize("device", BOTH)
def test_gradients_where_only_some_are_needed(device):
    assert run_ranks(some_need_gradients, 2, device=device) == [True] * 2


def disagree(rank, group):
    with pytest.raises(symm_a2a.ConfigError) as caught:
        SymmTokenDispatcher(config(num_lanes=2 + rank), group)
    return str(caught.value)


def test_ranks_that_disagree_learn_both_values():
    for message in run_ranks(disagree, 2):
        assert "num_lanes=2" in message
        assert "num_lanes=3" in message


def no_room(rank, group):
    cfg = config(max_tokens_per_rank=1 << 22, hidden_dim=8192) if rank == 1 else config()
    from symm_a2a.memory import host

    try:
        host.HostMemory(group, cfg.symmetric_bytes(2) if rank == 1 else 4096)
    except symm_a2a.EnvironmentUnsupportedError as error:
        return str(error), segments()


def test_a_rank_without_room_tells_every_rank_and_leaves_no_segment():
    for message, left in run_ranks(no_room, 2):
        assert "rank 1" in message
        assert "of room in /dev/shm" in message
        assert left == []


def two_lanes(rank, group):
    """Both lanes in flight at once, joined in order; the backward too."""
    results = []
    with SymmTokenDispatcher(config(dtype=torch.float64), group) as d:
        batches = [inputs(rank, step, torch.float64, device_of(group)) for step in range(2)]
        weight = weights(rank, 2, torch.float64, device_of(group))
        for overlapped in (True, False):
            xs = [x.clone().requires_grad_() for x, _, _ in batches]
            local = weight.clone().requires_grad_()
            time.sleep(0.02 * rank)
            if overlapped:
                flights = [
                    d.dispatch_async(x, s.double(), i, lane=lane)
                    for lane, (x, (_, s, i)) in enumerate(zip(xs, batches, strict=True))
                ]
                routed = [f.join() for f in flights]
                backs = [d.combine_async(apply_experts(r, n, local), h) for r, n, h in routed]
                outs = [b.join() for b in backs]
            else:
                outs = []
                for x, (_, s, i) in zip(xs, batches, strict=True):
                    rows, counts, handle = d.dispatch(x, s.double(), i)
                    outs.append(d.combine(apply_experts(rows, counts, local), handle))
            sum((out**2).sum() for out in outs).backward()
            results.append([*outs, *(x.grad for x in xs), local.grad])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    return True


@pytest.mark.parametrize("device", BOTH)
def test_two_lanes_in_flight(device):
    assert run_ranks(two_lanes, 2, device=device) == [True, True]


def compiled_with_idle_ranks(rank, group, backend):
    """A compiled layer whose ranks have no tokens in turn: a graph may not drop their exchange."""
    torch.manual_seed(0)
    device = device_of(group)
    with SymmTokenDispatcher(config(timeout=10), group) as dispatcher:
        router = torch.nn.Linear(D, E).to(device)

        def layer(x):
            scores, ids = router(x).softmax(-1).topk(K)
            rows, _, handle = dispatcher.dispatch(x, scores, ids)
            return x + dispatcher.combine(torch.tanh(rows), handle)

        compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
        for step, tokens in enumerate(((5, 7), (0, 4), (3, 0), (1, 1), (0, 0), (6, 2))):
            x = inputs(rank, step, torch.float32, device, tokens=tokens[rank])[0]
            results = []
            for run in (compiled, layer):
                leaf = x.clone().requires_grad_()
                out = run(leaf)
                (out**2).sum().backward()
                with torch.no_grad():
                    results.append((out.detach(), leaf.grad, run(x)))
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    return True


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_layers_on_ranks_without_tokens(device, backend):
    assert run_ranks(compiled_with_idle_ranks, 2, backend, device=device) == [True, True]


def wait_as_on_a_gpu():
    """Let kernels wait and the host not: the CUDA backend's protocol, in the interpreter."""
    from symm_a2a.memory.host import HostMemory

    HostMemory.host_waits, HostMemory.spins = False, True


def waits_in_kernels(rank, group, capacity):
    wait_as_on_a_gpu()
    W = dist.get_world_size(group)
    weight = weights(rank, W, torch.float32, "cpu")
    cfg = config(capacity=capacity)
    with SymmTokenDispatcher(cfg, group) as ours, AllToAllTokenDispatcher(config(), group) as theirs:
        for step in range(4):
            x, scores, ids = inputs(rank, step, torch.float32, "cpu")
            time.sleep(0.05 * ((rank + step) % W))
            lane = (None, 0, 1)[step % 3]
            mine = forward_backward(ours, x, scores, ids, weight, lane)
            base = forward_backward(theirs, x, scores, ids, weight)
            assert torch.equal(mine[0][: len(base[0])], base[0])
            assert torch.equal(mine[1], base[1])
            torch.testing.assert_close(mine[2:], base[2:], rtol=1e-5, atol=1e-5)
            # One direction twice in a row: the credit is waited for by a kernel of its own.
            rows, _, handle = ours.dispatch(x, scores, ids)
            first = ours.combine(rows, handle)
            time.sleep(0.05 * ((rank + step) % W))
            assert torch.equal(ours.combine(rows, handle), first)
    return True


@pytest.mark.parametrize("capacity", ["exact", 3 * C * K])
def test_kernels_that_wait_as_on_a_gpu(capacity):
    assert run_ranks(waits_in_kernels, 2, capacity) == [True, True]


def kernel_gives_up(rank, group):
    wait_as_on_a_gpu()
    dispatcher = SymmTokenDispatcher(config(timeout=0.002, capacity=40), group)
    x, scores, ids = inputs(rank, 0, torch.float32, "cpu", tokens=5)
    message = None
    if rank == 0:
        try:
            dispatcher.dispatch(x, scores, ids)
        except symm_a2a.PeerTimeoutError as error:
            message = str(error)
    dist.barrier(group)
    dispatcher.close()
    return message


def test_a_kernel_stops_waiting_and_names_the_peer():
    message, _ = run_ranks(kernel_gives_up, 2)
    assert message.startswith("rank 0 waited for its copies in dispatch, lane 0, epoch 1, but peer 1 did not")
