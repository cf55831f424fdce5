"""A forward and backward recorded once can be replayed with other data, as a CUDA graph does.

Nothing that a launch is given may change from one exchange to the next: epochs are read from the
device, sizes are the capacity's, flags are never reset.
"""

import pytest
import torch

import symm_a2a
from bench.gpu_check.launches import repeatable
from symm_a2a import reference
from symm_a2a.testing import run_ranks
from tests.ranks import wait_as_on_a_gpu

W, E, K, D, C = 2, 4, 3, 20, 150
CAPACITY = 2 * C * K * W
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Inputs:
    """Tensors at fixed addresses, filled anew for every step."""

    def __init__(self, tokens: int, rank: int, device: str) -> None:
        self.rank = rank
        self.x = torch.zeros(tokens, D, device=device, requires_grad=True)
        self.scores = torch.zeros(tokens, K, device=device, requires_grad=True)
        self.ids = torch.zeros(tokens, K, dtype=torch.int64, device=device)
        self.grad = torch.zeros(tokens, D, device=device)

    def fill(self, step: int) -> None:
        gen = torch.Generator().manual_seed(100 * step + self.rank)
        with torch.no_grad():
            for tensor in (self.x, self.scores, self.grad):
                tensor.copy_(torch.randn(tensor.shape, generator=gen))
            self.ids.copy_(torch.randint(-1, E, self.ids.shape, generator=gen))


def expected(every: list[Inputs]) -> list[list[torch.Tensor]]:
    """Outputs, gradients of x, and gradients of scores, by the oracle."""
    xs = [one.x.detach().cpu().requires_grad_() for one in every]
    scores = [one.scores.detach().cpu().requires_grad_() for one in every]
    ids = [one.ids.cpu() for one in every]
    rows, _ = reference.dispatch(xs, ids, E, 1, CAPACITY)
    outs = reference.combine(rows, scores, ids, E, 1, CAPACITY)
    grads = torch.autograd.grad(outs, [*xs, *scores], [one.grad.cpu() for one in every])
    return [list(outs), list(grads[: len(every)]), list(grads[len(every) :])]


def config(**changes):
    fields = dict(
        num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=C, dtype=torch.float32, capacity=CAPACITY
    )
    return symm_a2a.EPConfig(**(fields | changes))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.detach().cpu().double(), theirs.detach().double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [(9, 5), (C, 140)], ids=["small", "large"])
def test_replays_with_new_data_in_the_same_buffers(tokens, device):
    with symm_a2a.VirtualWorld(config(), W, device) as world:
        every = [Inputs(T, rank, device) for rank, T in enumerate(tokens)]

        def run():
            rows, _, handles = world.dispatch(
                [one.x for one in every], [one.scores for one in every], [one.ids for one in every]
            )
            outs = world.combine(rows, handles)
            leaves = [*(one.x for one in every), *(one.scores for one in every)]
            return outs, torch.autograd.grad(outs, leaves, [one.grad for one in every])

        for one in every:
            one.fill(0)
        (outs, grads), replay = repeatable(device, run)
        before = world.dispatchers[0].stats()
        for step in range(1, 11):
            for one in every:
                one.fill(step)
            replay()
            found = [*outs, *grads]
            wanted = [theirs for kind in expected(every) for theirs in kind]
            for ours, theirs in zip(found, wanted, strict=True):
                close(ours, theirs)
        done = world.dispatchers[0].stats() - before
        assert done.exchanges["dispatch"] == done.exchanges["dispatch_backward"] == 10
        assert done.launches == 0


def replay_between_processes(rank, group):
    wait_as_on_a_gpu()
    every = [Inputs(T, other, "cpu") for other, T in enumerate((C, 7))]
    mine = every[rank]
    with symm_a2a.SymmTokenDispatcher(config(timeout=30), group) as dispatcher:

        def run():
            rows, _, handle = dispatcher.dispatch(mine.x, mine.scores, mine.ids)
            out = dispatcher.combine(rows, handle)
            return out, *torch.autograd.grad(out, [mine.x, mine.scores], mine.grad)

        mine.fill(0)
        found, replay = repeatable("cpu", run)
        for step in range(1, 6):
            for one in every:
                one.fill(step)
            replay()
            for ours, theirs in zip(found, expected(every), strict=True):
                close(ours, theirs[rank])
        return dispatcher.stats().exchanges["combine"]


def test_replays_in_which_the_kernels_wait_for_each_other():
    """One rank counts in its scatter, the other ahead of it; nothing but flags keeps them in step."""
    assert run_ranks(replay_between_processes, W) == [6, 6]
