"""A group of one, and the smallest block over it: what tests of misuse and modes start from."""

import pytest
import torch

import symm_a2a
from symm_a2a import SymmTokenDispatcher

E, K, D = 2, 1, 3
X, SCORES, IDS = torch.ones(2, D), torch.full((2, K), 0.5), torch.tensor([[0], [1]])


@pytest.fixture
def carrier():
    cfg = symm_a2a.EPConfig(
        num_experts=E, top_k=K, hidden_dim=D, max_tokens_per_rank=4, dtype=torch.float32, num_lanes=2
    )
    with SymmTokenDispatcher(cfg, device="cpu") as dispatcher:
        yield dispatcher


def launch(carrier, **options):
    return carrier.dispatch_async(X, SCORES, IDS, **options)


def right(carrier):
    rows, _, handle = yield launch(carrier)
    return (yield carrier.combine_async(rows, handle))
