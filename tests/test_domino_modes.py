"""Modes that a micro-batch holds open across a yield would reach the others: they are named and refused."""

import contextlib
import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from symm_a2a import Domino
from symm_a2a.errors import ScheduleError
from tests.domino_blocks import X, carrier, launch, right

__all__ = ["carrier"]


class PassesOn(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "torch.no_grad": torch.no_grad,
    "torch.inference_mode": torch.inference_mode,
    'torch.autocast("cpu")': lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "torch.set_default_dtype": default_dtype,
    "torch.device": lambda: torch.device("meta"),
    "a torch dispatch mode": PassesOn,
    "torch.nn.attention.sdpa_kernel": lambda: sdpa_kernel(SDPBackend.MATH),
    "torch.use_deterministic_algorithms": deterministic,
    "torch.autograd.detect_anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
}


def modes_now():
    """What a mode changes for whoever runs next, asked of torch itself."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.get_default_device(),
        torch.ones(1).device,
        torch._C._len_torch_dispatch_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
    )


@pytest.mark.parametrize("at", ["dispatch", "combine"])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("name", MODES)
def test_a_mode_held_across_a_yield_is_named_and_left(carrier, name, index, at):
    def held(number, here):
        return MODES[name]() if (number, here) == (index, at) else contextlib.nullcontext()

    def block(number):
        pending = launch(carrier)
        with held(number, "dispatch"):
            rows, _, handle = yield pending
        pending = carrier.combine_async(rows, handle)
        with held(number, "combine"):
            return (yield pending)

    before = modes_now()
    expected = f"expected micro-batch {index} to leave every mode before a yield, got .*{re.escape(name)}"
    with pytest.raises(ScheduleError, match=expected):
        Domino(carrier, 2).run(block, [0, 1])
    assert modes_now() == before


@pytest.mark.parametrize("name", MODES)
def test_a_mode_around_the_run_or_between_the_yields_is_fine(carrier, name):
    def block(number):
        rows, _, handle = yield launch(carrier)
        with MODES[name]():
            torch.ones(3) * 2
        return (yield carrier.combine_async(rows, handle))

    before = modes_now()
    outs = Domino(carrier, 2).run(block, [0, 1])
    with MODES[name]():
        inside = modes_now()
        outs += Domino(carrier, 2).run(lambda _: right(carrier), [0, 1])
        assert modes_now() == inside
    assert modes_now() == before
    assert all(torch.equal(out, X * 0.5) for out in outs)


def test_a_mode_left_open_at_the_end_is_named(carrier):
    no_grad = torch.no_grad()

    def block(number):
        out = yield from right(carrier)
        no_grad.__enter__()
        return out

    try:
        with pytest.raises(ScheduleError, match=r"every mode before its end, got torch.no_grad"):
            Domino(carrier, 2).run(block, [0, 1])
    finally:
        no_grad.__exit__(None, None, None)


def test_a_mode_set_while_the_generator_is_made_is_named(carrier):
    def make(_):
        torch.set_grad_enabled(False)
        return right(carrier)

    try:
        with pytest.raises(ScheduleError, match=r"before its start, got torch.no_grad"):
            Domino(carrier, 1).run(make, [0])
    finally:
        torch.set_grad_enabled(True)
