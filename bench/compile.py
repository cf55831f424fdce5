"""Compile the kernels as a dispatcher would launch them, for any target, without a GPU.

Works where kernels are not interpreted, that is with `TRITON_INTERPRET=0`. Launches are
recorded from a virtual world: kernel, arguments, options. Nothing runs, so the world must not
read anything back from its kernels: its capacity must be static.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import symm_a2a
from symm_a2a import arena

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = ("num_warps", "num_stages", "num_ctas")
_DIVISIBLE = [["tt.divisibility", 16]]


@dataclasses.dataclass(frozen=True)
class Launch:
    """One recorded launch: the kernel, its named arguments, its compile options."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name, as in its file."""
        return self.kernel.fn.__name__

    @property
    def variant(self) -> str:
        """The kernel's name with the constants that choose a form of it."""
        chosen = ("PLACE", "WEIGHTED", "KIND", "HAS_SCORES")
        forms = [f"{k}={int(v)}" for k, v in self.arguments.items() if k in chosen]
        return f"{self.name}[{','.join(forms)}]" if forms else self.name

    def compile(self, target: GPUTarget) -> triton.compiler.CompiledKernel:
        """Compile as Triton would on launch: same signature, constants and alignment."""
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name] = "constexpr"
                constants[(place,)] = value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = _POINTERS[value.dtype]
                if value.data_ptr() % 16 == 0:
                    attributes[(place,)] = _DIVISIBLE
            else:
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if not parameter.do_not_specialize and value % 16 == 0:
                    attributes[(place,)] = _DIVISIBLE
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=target, options=self.options)


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record every launch made inside, and run none of them."""
    launches: list[Launch] = []
    run, require_runnable = JITFunction.run, arena.require_runnable

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        names = [parameter.name for parameter in self.params]
        launches.append(Launch(self, dict(zip(names, args, strict=False)) | kwargs, options))

    JITFunction.run = record
    # What does not run need not be runnable here.
    arena.require_runnable = lambda device: None
    try:
        yield launches
    finally:
        JITFunction.run, arena.require_runnable = run, require_runnable


def launches_of(cfg: symm_a2a.EPConfig, world_size: int, num_tokens: int) -> list[Launch]:
    """Return what one rank launches in a forward and backward of `cfg`, each form once.

    The forms of a GPU group are recorded: launches that end with a wait for the peers.

    Args:
        cfg: of a static capacity.
        world_size: ranks of the group.
        num_tokens: tokens of each rank.
    """
    from symm_a2a.kernels.blocks import INTERPRETED

    if INTERPRETED:
        raise RuntimeError("expected kernels to be compiled, got TRITON_INTERPRET=1; set it to 0")
    from symm_a2a.kernels import credit, row_count
    from symm_a2a.kernels.channel import Kind

    ids = torch.zeros(num_tokens, cfg.top_k, dtype=torch.int64)
    x = torch.zeros(num_tokens, cfg.hidden_dim, dtype=cfg.dtype, requires_grad=True)
    scores = torch.zeros(num_tokens, cfg.top_k, requires_grad=True)
    with recorded_launches() as launches, symm_a2a.VirtualWorld(cfg, world_size, "cpu") as world:
        for dispatcher in world.dispatchers:
            for lane in dispatcher.arena.lanes:
                lane.channel = dataclasses.replace(lane.channel, spins=True, polls=1000, programs=528)
        rows, _, handles = world.dispatch([x] * world_size, [scores] * world_size, [ids] * world_size)
        torch.cat(world.combine(rows, handles)).sum().backward()
        channel = world.dispatchers[0].arena.lanes[0].channel
        row_count.row_count(channel, torch.zeros(1, dtype=torch.int64), cfg.pad_multiple)
        credit.credit(channel, Kind.COMBINE)
    return list({launch.variant: launch for launch in launches}.values())
