"""The operators of sequence exchanges in a group of one: schemas, gradients, compiled graphs."""

import shutil

import pytest
import torch

from symm_a2a import SequenceGroup, head_to_seq, seq_to_head
from symm_a2a.testing import OpGuard, run_ranks
from tests.ranks import wait_as_on_a_gpu

HAVE_COMPILER = any(map(shutil.which, ("g++", "clang++", "c++")))


def test_opcheck():
    with SequenceGroup(device="cpu") as group:
        for x in (torch.randn(2, 3, 4, 5, requires_grad=True), torch.randn(2, 0, 4, 5).double()):
            arguments = (x, group.anchor, group.number, 1, 1)
            torch.library.opcheck(torch.ops.symm_a2a.seq_to_head, arguments)
            torch.library.opcheck(torch.ops.symm_a2a.head_to_seq, arguments)


def test_gradients_of_both_orders():
    with SequenceGroup(device="cpu") as group:
        x = torch.randn(1, 2, 2, 3, dtype=torch.float64, requires_grad=True)
        for exchange in (seq_to_head, head_to_seq):
            assert torch.autograd.gradcheck(lambda t, f=exchange: f(t, group) ** 3, x)
            assert torch.autograd.gradgradcheck(lambda t, f=exchange: f(t, group) ** 3, x)


@pytest.mark.skipif(not HAVE_COMPILER, reason="inductor needs a C++ compiler")
def test_inductor():
    torch._dynamo.reset()
    with SequenceGroup(device="cpu") as group:

        def block(x):
            return head_to_seq(torch.tanh(seq_to_head(x * 2, group)), group)

        compiled = torch.compile(block, fullgraph=True, dynamic=True)
        for s in (3, 5, 0):
            x = torch.randn(2, s, 4, 5, requires_grad=True)
            out = compiled(x)
            torch.testing.assert_close(out, torch.tanh(x * 2))
            (grad,) = torch.autograd.grad(out.sum(), x)
            torch.testing.assert_close(grad, 2 * (1 - torch.tanh(x * 2) ** 2))


def launches(rank, group):
    """What one exchange, and one forward and backward, start on the device; the host waits for nothing."""
    wait_as_on_a_gpu()
    with SequenceGroup(group, max_bytes=4096) as ours:
        x, counts = torch.ones(1, 2, 4, 3, requires_grad=True), []
        apart = x.detach().transpose(1, 2).contiguous().transpose(1, 2)
        grad = torch.ones(1, 4, 2, 3)
        for call in (
            lambda: seq_to_head(x, ours),
            lambda: seq_to_head(apart, ours),
            lambda: torch.autograd.grad(seq_to_head(x, ours), x, grad),
        ):
            with OpGuard() as guard:
                call()
            counts.append((guard.launches.total(), guard.compute_ops.total()))
    return counts


def test_an_exchange_is_two_launches_and_nothing_else():
    assert run_ranks(launches, 2) == [[(2, 0), (2, 0), (4, 0)]] * 2
