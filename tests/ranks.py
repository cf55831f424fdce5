"""What tests over rank processes share: sizes, inputs, and one layer forward and backward."""

import pytest
import torch
import torch.distributed as dist

import symm_a2a
from tests.cases import apply_experts

E, K, D, C = 8, 3, 33, 24
BOTH = [
    pytest.param("cpu", id="host"),
    pytest.param("cuda", id="cuda", marks=pytest.mark.multigpu),
]
SHARED = [
    pytest.param("cpu", id="host"),
    pytest.param("cuda:0", id="one-gpu", marks=pytest.mark.gpu),
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


def wait_as_on_a_gpu():
    """Let kernels wait and the host not: the CUDA backend's protocol, in the interpreter."""
    from symm_a2a.memory.host import HostMemory

    HostMemory.host_waits, HostMemory.spins = False, True
