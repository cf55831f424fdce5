"""No kernel touches memory that it was not given, whatever the sizes and the number of programs.

A GPU may refuse an access out of bounds, or serve it; the interpreter reads on, and what it reads is used
nowhere. So every access is looked at.
"""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from symm_a2a import VirtualWorld
from tests.cases import Case, cases, examples, use_small_blocks


class Bounds:
    """Where the tensors lie that the launch in progress was given, and the arenas."""

    def __init__(self) -> None:
        self.arenas: list[torch.Tensor] = []
        self.given: list[torch.Tensor] = []
        self.accesses = 0

    def check(self, pointers, mask) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        first = np.broadcast_to(pointers.data, mask.data.shape)[mask.data].astype(np.int64).ravel()
        inside = np.zeros(first.shape, dtype=bool)
        for tensor in (*self.arenas, *self.given):
            begin = tensor.data_ptr()
            inside |= (first >= begin) & (first + size <= begin + tensor.numel() * tensor.element_size())
        self.accesses += first.size
        assert inside.all(), f"{(~inside).sum()} of {first.size} accesses out of bounds"


@pytest.fixture
def bounds(monkeypatch):
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__
    found = Bounds()

    def checked_load(self, ptrs, mask, *rest):
        found.check(ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def checked_store(self, ptrs, value, mask, *rest):
        found.check(ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    def called(self, *args, **kwargs):
        found.given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        return call(self, *args, **kwargs)

    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)
    monkeypatch.setattr(executor, "__call__", called)
    return found


def exchange(bounds, case, capacity, programs):
    """A forward and backward of every rank, in small tiles."""
    cfg = case.config(dtype=torch.float32, capacity=case.whole(capacity), overflow="drop")
    xs = [x.requires_grad_() for x in case.xs(torch.float32)]
    with VirtualWorld(cfg, case.world_size, "cpu") as world:
        use_small_blocks(world)
        bounds.arenas = world.dispatchers[0].arena.memory.arenas
        for dispatcher in world.dispatchers:
            for lane in dispatcher.arena.lanes:
                lane.channel = dataclasses.replace(lane.channel, programs=programs)
        rows, _, handles = world.dispatch(xs, case.scores(torch.float32), case.ids())
        torch.cat(world.combine(rows, handles)).sum().backward()


@settings(max_examples=examples(4), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    case=cases(max_ranks=4, max_tokens=20, max_hidden=20),
    capacity=st.sampled_from(["exact", 3, 100]),
    programs=st.integers(1, 7),
)
def test_every_access_is_within_a_tensor(bounds, case, capacity, programs):
    exchange(bounds, case, capacity, programs)
    assert bounds.accesses


@pytest.mark.parametrize(("tokens", "capacity"), [(10, 200), (18, "exact"), (21, 200), (37, "exact")])
def test_programs_without_a_block_read_no_sums(bounds, tokens, capacity):
    """Blocks of 2 and 4 tokens over 4 programs: the last program, or two, have none."""
    fixed = dict(
        num_local_experts=2, top_k=2, hidden_dim=8, tokens=(tokens, tokens), skew="none", masked=0.0,
        ids_dtype=torch.int64, pad_multiple=1, seed=1,
    )  # fmt: skip
    exchange(bounds, Case(**fixed), capacity, 4)
