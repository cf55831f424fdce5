"""The guard sees what it is for: waits of the host and operators, wherever they hide."""

import numpy as np
import pytest
import torch

from symm_a2a.testing import HiddenSyncError, OpGuard, guard

READS = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0]),
    "condition": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "mask assigned": lambda x: x.clone().index_put_((x > 0,), torch.tensor(1.0)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.long().bincount(),
    "repeats": lambda x: torch.repeat_interleave(x, torch.tensor([1, 2, 1])),
}


@torch.library.custom_op("symm_a2a_tests::reads", mutates_args=())
def reads(x: torch.Tensor) -> torch.Tensor:
    """An operator whose author did not think of GPUs."""
    return x * x.max().item()


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.sum().item()


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_by_the_host_is_refused(read):
    x = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(HiddenSyncError, match="expected no wait of the host, got "), OpGuard():
        read(x)
    with OpGuard(allow_syncs=True) as counting:
        read(x)
    assert counting.host_syncs
    read(x)


def test_what_hides_in_a_custom_operator_or_a_backward_is_seen():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(HiddenSyncError), OpGuard():
        reads(x.detach())
    out = ReadsInBackward.apply(x).sum()
    with pytest.raises(HiddenSyncError), OpGuard():
        out.backward()


def test_shapes_views_and_allocations_are_free():
    x = torch.ones(4, 4)
    with OpGuard() as counting:
        y = x.view(16)[2:5].unsqueeze(0).expand(3, 3).T.detach()
        torch.empty_like(y)
        x.new_empty(3)
        assert y.shape == (3, 3)
    assert not counting.compute_ops


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        ("mul", lambda x: x * 2),
        ("zeros", lambda x: torch.zeros(3)),
        ("fill_", lambda x: x.new_empty(3).fill_(1)),
        ("copy_", lambda x: x.clone().copy_(x)),
        ("clone", lambda x: x.T.contiguous()),
        ("_to_copy", lambda x: x.double()),
    ],
)
def test_what_computes_copies_or_fills_is_counted(name, compute):
    x = torch.ones(2, 2)
    with OpGuard() as counting:
        compute(x)
    assert counting.compute_ops[name] == 1


def test_copies_between_cpu_and_gpu_are_waits_unless_they_are_asynchronous():
    """No GPU is needed to judge one: only devices are looked at."""
    gpu, cpu = torch.empty(2, device="meta"), torch.empty(2)
    for pair in ((cpu, gpu), (gpu, cpu)):
        assert guard._crosses("copy_", pair, {})
        assert guard._crosses("copy_", (*pair, False), {})
        assert not guard._crosses("copy_", (*pair, True), {})
        assert not guard._crosses("copy_", pair, {"non_blocking": True})
        assert guard._crosses("_to_copy", pair[:1], {"device": pair[1].device})
        assert not guard._crosses("_to_copy", pair[:1], {"device": pair[1].device, "non_blocking": True})
    for one in (cpu, gpu):
        assert not guard._crosses("copy_", (one, one), {})
        assert not guard._crosses("_to_copy", (one,), {"dtype": torch.float64})
        assert not guard._crosses("mul", (one, one), {})


def test_masks_are_of_booleans_or_bytes_and_may_stand_anywhere():
    x, where = torch.ones(2, 3), torch.tensor([0, 1])
    for dtype in (torch.bool, torch.uint8):
        assert guard._selects_by_mask("index", (x, [None, where.to(dtype)]))
    assert not guard._selects_by_mask("index", (x, [None, where]))
    assert not guard._selects_by_mask("gather", (x, [where.bool()]))


def test_nothing_is_seen_outside():
    with OpGuard() as counting:
        pass
    torch.ones(3).sum().item()
    assert not counting.compute_ops
    with pytest.raises(HiddenSyncError), counting:
        torch.ones(3).sum().item()
