"""Sequence exchanges between processes: against collectives and whole sequences, forward and backward."""

import copy
import logging
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from symm_a2a import (
    ClosedError,
    InputError,
    SequenceGroup,
    checkpoint_ops,
    head_to_seq,
    seq_to_head,
)
from symm_a2a.kernels.ulysses import Cell
from symm_a2a.testing import run_ranks
from tests.ranks import device_of, wait_as_on_a_gpu


class StandardSeqToHead(torch.autograd.Function):
    """Reshape, all_to_all_single, permute."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, W = group, dist.get_world_size(group)
        b, s, h, d = x.shape
        sent = x.reshape(b, s, W, h // W, d).permute(2, 0, 1, 3, 4).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received.permute(1, 0, 2, 3, 4).reshape(b, W * s, h // W, d)

    @staticmethod
    def backward(ctx, grad):
        return StandardHeadToSeq.apply(grad, ctx.group), None


class StandardHeadToSeq(torch.autograd.Function):
    """The other way."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, W = group, dist.get_world_size(group)
        b, S, H, d = x.shape
        sent = x.reshape(b, W, S // W, H, d).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received.permute(1, 2, 0, 3, 4).reshape(b, S // W, W * H, d)

    @staticmethod
    def backward(ctx, grad):
        return StandardSeqToHead.apply(grad, ctx.group), None


def epoch(group):
    """Exchanges so far."""
    return int(group._lane.channel.state[Cell.EPOCH])


def attention(q, k, v):
    """Every query sees every key of its group's head."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def draw(seed, shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def equals_the_standard(rank, group, on_device):
    with SequenceGroup(group, max_bytes=1 << 14, timeout=20) as ours:
        W = ours.world_size
        for seed, (dtype, (b, s, H, d)) in enumerate(
            (dtype, sizes)
            for dtype in (torch.bfloat16, torch.float32)
            for sizes in ((1, 3, 1, 5), (2, 2, 3, 8), (2, 0, 1, 4), (0, 2, 1, 4))
        ):
            for ours_of, standard, shape in (
                (seq_to_head, StandardSeqToHead, (b, s, W * H, d)),
                (head_to_seq, StandardHeadToSeq, (b, W * s, H, d)),
            ):
                x = draw(100 * seed + rank, shape, dtype).to(on_device).requires_grad_()
                out, theirs = ours_of(x, ours), standard.apply(x, group)
                assert torch.equal(out, theirs)
                grad = draw(100 * seed + rank + 50, out.shape, dtype).to(on_device)
                # In the order of attention's own layout; and of a sum, with stride 0.
                for g in (
                    grad.transpose(1, 2).contiguous().transpose(1, 2),
                    grad.new_ones(()).expand(out.shape),
                ):
                    (one,) = torch.autograd.grad(out, x, g, retain_graph=True)
                    (other,) = torch.autograd.grad(theirs, x, g, retain_graph=True)
                    assert torch.equal(one, other)
                    assert one.shape == x.shape


def attends_as_one(rank, group, kv_heads):
    """Sequence-parallel attention, and that of one process over the whole sequences."""
    with SequenceGroup(group, max_bytes=1 << 14) as ours:
        W, (b, s, h, d) = ours.world_size, (2, 3, 8, 5)
        heads = {"q": h, "k": kv_heads, "v": kv_heads}
        wholes = {n: draw(i, (b, W * s, heads[n], d)).requires_grad_() for i, n in enumerate(heads)}
        parts = {
            n: t.detach()[:, rank * s : (rank + 1) * s].clone().requires_grad_() for n, t in wholes.items()
        }
        apart = {n: seq_to_head(t, ours, replicate=True) for n, t in parts.items()}
        assert apart["k"].shape == (b, W * s, max(1, kv_heads // W), d)
        out = head_to_seq(attention(*apart.values()), ours)
        expected = attention(*wholes.values())
        torch.testing.assert_close(out, expected[:, rank * s : (rank + 1) * s], rtol=1e-12, atol=1e-12)
        weight = draw(9, expected.shape)
        (expected * weight).sum().backward()
        (out * weight[:, rank * s : (rank + 1) * s]).sum().backward()
        for name, part in parts.items():
            theirs = wholes[name].grad[:, rank * s : (rank + 1) * s]
            torch.testing.assert_close(part.grad, theirs, rtol=1e-12, atol=1e-12)


def results_are_nobodys_memory(rank, group):
    with SequenceGroup(group, max_bytes=4096) as ours:
        results = []
        for n in range(5):
            x = torch.full((1, 2, 4, 8), float(10 * n + rank))
            out = seq_to_head(x, ours)
            x.zero_()
            results.append((out, out.clone()))
            out.data_ptr()
        for out, then in results:
            assert torch.equal(out, then)
            arena = ours._lane.memory.arenas[rank]
            assert not arena.data_ptr() <= out.data_ptr() < arena.data_ptr() + arena.nbytes
        for out, _ in results:
            out.fill_(-1)  # What a caller does with a result changes no later one.
        x = torch.full((1, 2, 4, 8), float(rank))
        assert set(seq_to_head(x, ours).unique().tolist()) == set(range(ours.world_size))


def backward_on_every_rank(rank, group):
    """Rank 0's input needs no gradient, nor does anything else there: its backward runs all the same."""
    with SequenceGroup(group, max_bytes=4096) as ours:
        x = torch.full((1, 2, 4, 2), float(rank + 1), requires_grad=rank != 0)
        before = epoch(ours)
        out = head_to_seq(seq_to_head(x, ours) ** 2, ours)
        out.sum().backward()
        assert epoch(ours) == before + 4
        assert ours.anchor.grad is None
        if rank:
            assert torch.equal(x.grad, 2 * x.detach())
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                again = seq_to_head(x, ours)
            assert not again.requires_grad
            assert epoch(ours) == before + 5
            before += 1


def recomputes(rank, group):
    with SequenceGroup(group, max_bytes=4096) as ours:
        weight = draw(3, (4, 4)).requires_grad_()

        def block(x):
            return head_to_seq(torch.tanh(seq_to_head(x @ weight, ours)), ours)

        grads = []

        def kept():
            return create_selective_checkpoint_contexts(checkpoint_ops())

        for run in (
            block,
            lambda x: checkpoint(block, x, use_reentrant=False),
            lambda x: checkpoint(block, x, use_reentrant=False, context_fn=kept),
        ):
            x = draw(rank, (1, 3, 4, 4)).requires_grad_()
            before = epoch(ours)
            (run(x) ** 2).sum().backward()
            grads.append((x.grad, weight.grad, epoch(ours) - before))
            weight.grad = None
        (x1, w1, plain), *others = grads
        # Forward, backward, and what the recompute repeats: both, or with their results saved neither.
        assert [plain, *(repeated for *_, repeated in others)] == [4, 6, 4]
        for x2, w2, _ in others:
            assert torch.equal(x1, x2)
            assert torch.equal(w1, w2)


def differentiates_twice(rank, group):
    """A penalty on a gradient: each exchange's backward is an exchange with a backward."""
    with SequenceGroup(group, max_bytes=4096) as ours:
        W, s = ours.world_size, 2
        whole = draw(5, (1, W * s, 4, 3)).requires_grad_()
        x = whole.detach()[:, rank * s : (rank + 1) * s].clone().requires_grad_()
        grads = []
        for leaf, out in ((whole, whole), (x, seq_to_head(x, ours))):
            (grad,) = torch.autograd.grad((out**3).sum(), leaf, create_graph=True)
            (grad**2).sum().backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(grads[1], grads[0][:, rank * s : (rank + 1) * s], rtol=1e-12, atol=1e-12)


def compiles(rank, group):
    """One graph with both directions and replicas; only rank 0's input needs a gradient."""
    weight = draw(3, (4, 4), torch.float32).requires_grad_()
    explicit, own = SequenceGroup(group, max_bytes=1 << 14), SequenceGroup.of(group)
    for g, lengths in ((explicit, (3, 5, 0)), (group, (3,))):

        def block(x, g=g):
            q = seq_to_head(x @ weight, g)
            k = seq_to_head(x[:, :, :1], g, replicate=True)
            return head_to_seq(torch.tanh(q) + k, g)

        torch._dynamo.reset()
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
        for s in lengths:
            results = []
            for run in (compiled, block):
                x = draw(10 * s + rank, (2, s, 4, 4), torch.float32).requires_grad_(rank == 0)
                out = run(x)
                (out**2).sum().backward()
                results.append((out.detach(), weight.grad, x.grad if rank == 0 else out.detach()))
                weight.grad = None
                with torch.no_grad():
                    assert torch.equal(run(x), out)
            for one, other in zip(*results, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert explicit.allocated_bytes
    assert own.allocated_bytes
    explicit.close()
    own.close()


def two_groups(rank, group):
    """Two of four ranks each, in both orders of the ranks; every rank is in two of three groups."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    with SequenceGroup(mine, max_bytes=4096) as ours, SequenceGroup(group, max_bytes=4096) as everyone:
        x = draw(rank, (1, 2, 4, 3)).requires_grad_()
        for _ in range(3):
            near, far = seq_to_head(x, ours), seq_to_head(x, everyone)
            assert torch.equal(near, StandardSeqToHead.apply(x.detach(), mine))
            assert torch.equal(far, StandardSeqToHead.apply(x.detach(), group))
            near = near if rank < 2 else near * 2
            (grad,) = torch.autograd.grad(near.sum() + far.sum(), x)
            assert torch.equal(grad, torch.full_like(x, 2.0 if rank < 2 else 3.0))
    return ours.number != everyone.number


def grows(rank, group, folder):
    """A process group's memory comes with its first exchange, and grows when all ranks need more."""
    logger = logging.getLogger("symm_a2a.ulysses.group")
    handler = logging.FileHandler(f"{folder}/{rank}")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    group_of = SequenceGroup.of(group)
    assert group_of is SequenceGroup.of(group)
    sizes = []
    x = draw(rank, (1, 2, 4, 3)).requires_grad_()
    out = seq_to_head(x, group)
    for d in (3, 1 << 16, 5):
        wide = draw(rank, (1, 2, 4, d), torch.float32)
        assert torch.equal(head_to_seq(seq_to_head(wide, group), group), wide)
        sizes.append(group_of.allocated_bytes)
    out.sum().backward()  # Launched before the growth, and its backward comes after.
    assert torch.equal(x.grad, torch.ones_like(x))
    W = dist.get_world_size(group)
    group_of.close()
    assert group_of.allocated_bytes == 0
    assert torch.equal(head_to_seq(seq_to_head(x, group), group), x)
    assert SequenceGroup.of(group) is not group_of
    SequenceGroup.of(group).close()
    handler.close()
    small, large = (SequenceGroup.symmetric_bytes(n, W) for n in (1 << 20, 1 << 21))
    assert sizes == [small, large, large]


def refuses(rank, group):
    """Arguments that no peer hears of; the group goes on."""
    ours = SequenceGroup(group, max_bytes=4096)
    x, messages = torch.ones(1, 2, 4, 3), []
    for call in (
        lambda: seq_to_head(torch.ones(1, 2, 6, 3), ours),
        lambda: seq_to_head(torch.ones(1, 2, 2, 3), ours),
        lambda: seq_to_head(torch.ones(1, 2, 3, 3), ours, replicate=True),
        lambda: head_to_seq(torch.ones(1, 6, 2, 3), ours),
        lambda: seq_to_head(torch.ones(2, 4, 3), ours),
        lambda: seq_to_head(torch.ones(1, 2, 4, 0), ours),
        lambda: seq_to_head(x.int(), ours),
        lambda: seq_to_head(x.to("meta"), ours),
        lambda: seq_to_head(torch.ones(1, 2, 4, 4000), ours),
        lambda: seq_to_head(x, "group"),
    ):
        with pytest.raises(InputError) as caught:
            call()
        messages.append(str(caught.value))
    assert torch.equal(head_to_seq(seq_to_head(x, ours), ours), x)
    assert copy.deepcopy(ours) is ours
    with pytest.raises(TypeError, match="no pickling"):
        pickle.dumps(ours)
    out = seq_to_head(x.requires_grad_(), ours)
    ours.close()
    ours.close()
    for call in (lambda: seq_to_head(x, ours), lambda: out.sum().backward()):
        with pytest.raises(ClosedError):
            call()
    return messages


def test_exchanges_and_gradients_equal_the_standard_bit_for_bit():
    run_ranks(as_ever, 2, [(equals_the_standard, "cpu"), (results_are_nobodys_memory,)])


def as_ever(rank, group, calls):
    for call, *args in calls:
        call(rank, group, *args)


@pytest.mark.multigpu
def test_exchanges_and_gradients_equal_the_standard_bit_for_bit_on_gpus():
    run_ranks(on_gpus, 2, device="cuda")


def on_gpus(rank, group):
    equals_the_standard(rank, group, device_of(group))


def test_four_ranks():
    calls = [(equals_the_standard, "cpu"), (attends_as_one, 8), (attends_as_one, 4), (attends_as_one, 2)]
    calls += [(attends_as_one, 1), (results_are_nobodys_memory,), (two_groups,)]
    run_ranks(as_ever, 4, calls)


def test_gradients_exist_on_every_rank_and_once_more():
    calls = [backward_on_every_rank, recomputes, differentiates_twice]
    run_ranks(as_ever, 2, [(call,) for call in calls])


def test_compiled_graphs():
    run_ranks(compiles, 2, timeout=240)


def test_where_kernels_wait_as_on_a_gpu():
    run_ranks(waiting, 2)


def waiting(rank, group):
    wait_as_on_a_gpu()
    equals_the_standard(rank, group, "cpu")
    recomputes(rank, group)


def test_a_process_groups_memory_grows(tmp_path):
    run_ranks(grows, 2, str(tmp_path))
    for rank in range(2):
        log = (tmp_path / str(rank)).read_text().splitlines()
        assert log[0].startswith(f"rank {rank} of 2: 2.0 MiB of symmetric memory for two results of 1048576")
        assert len(log) == 3, "the first, a larger one, and anew after close"


def test_arguments_that_cannot_be():
    messages, other = run_ranks(refuses, 4)[:2]
    assert messages == other
    for message, text in zip(
        messages,
        (
            "expected heads that divide among 4 ranks, got 6",
            "expected at least one head for each of 4 ranks, got 2; replicate=True gives each head to 2 ",
            "expected heads that divide among 4 ranks, got 3",
            "expected a sequence that divides among 4 ranks, got 6 tokens",
            "expected x of shape (batch, sequence, heads, dim), got (2, 4, 3)",
            "expected x of shape (batch, sequence, heads, dim), got (1, 2, 4, 0)",
            "expected x of a dtype in",
            "expected x on cpu, got meta",
            "expected a result of at most max_bytes = 4096 bytes on a rank, got 128000",
            "expected a SequenceGroup or a ProcessGroup, got str",
        ),
        strict=True,
    ):
        assert message.startswith(text)
