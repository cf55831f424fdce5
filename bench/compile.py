"""Compile the kernels as a dispatcher would launch them, for any target, without a GPU.

Works where kernels are not interpreted, that is with `TRITON_INTERPRET=0`. Launches are
recorded from a virtual world: kernel, arguments, options. Nothing runs, so the world must not
read anything back from its kernels: its capacity must be static.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import symm_a2a
from symm_a2a import arena

if TYPE_CHECKING:
    from symm_a2a.kernels.channel import Channel

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
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_DIVISIBLE = [["tt.divisibility", 16]]


@dataclasses.dataclass(frozen=True)
class Launch:
    """One recorded launch.

    Attributes:
        kernel: the compiled function.
        arguments: by name.
        options: of the compiler.
        grid: programs.
    """

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: int

    @property
    def name(self) -> str:
        """The kernel's name, as in its file."""
        return self.kernel.fn.__name__

    @property
    def variant(self) -> str:
        """The kernel's name with the constants that choose a form of it."""
        chosen = ("PLACE", "COUNTS_TOO", "WEIGHTED", "KIND", "HAS_SCORES", "HAS_COUNTS", "STRIDED", "SUMS")
        forms = [f"{k}={int(v)}" for k, v in self.arguments.items() if k in chosen or (k == "HOLDS" and v)]
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


def element_of(dtype: torch.dtype) -> str:
    """Return Triton's name of a dtype, as in "bf16"."""
    return _POINTERS[dtype][1:]


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record every launch made inside, and run none of them."""
    launches: list[Launch] = []
    run, require_runnable = JITFunction.run, arena.require_runnable

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        names = [parameter.name for parameter in self.params]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        launches.append(Launch(self, arguments, options, math.prod(grid)))

    JITFunction.run = record
    # What does not run need not be runnable here.
    arena.require_runnable = lambda device: None
    try:
        yield launches
    finally:
        JITFunction.run, arena.require_runnable = run, require_runnable


def launches_of(
    cfg: symm_a2a.EPConfig, world_size: int, num_tokens: int, multiprocessors: int = 132
) -> list[Launch]:
    """Return what one rank launches in a forward and backward of `cfg`, and beside them; each form once.

    The forms of a GPU group are recorded: launches that end with a wait for the peers.

    Args:
        cfg: of a static capacity.
        world_size: ranks of the group.
        num_tokens: tokens of each rank.
        multiprocessors: of the GPU, which grids depend on.
    """
    from symm_a2a.kernels.blocks import INTERPRETED

    if INTERPRETED:
        raise RuntimeError("expected kernels to be compiled, got TRITON_INTERPRET=1; set it to 0")
    ids = torch.zeros(num_tokens, cfg.top_k, dtype=torch.int64)
    x = torch.zeros(num_tokens, cfg.hidden_dim, dtype=cfg.dtype, requires_grad=True)
    scores = torch.zeros(num_tokens, cfg.top_k, requires_grad=True)
    with recorded_launches() as launches, symm_a2a.VirtualWorld(cfg, world_size, "cpu") as world:
        # The forms of debug mode are behind the plain ones.
        for holds in (False, True):
            for dispatcher in world.dispatchers:
                for lane in dispatcher.arena.lanes:
                    lane.channel = dataclasses.replace(
                        lane.channel,
                        spins=True,
                        polls=1000,
                        programs=cfg.num_programs,
                        multiprocessors=multiprocessors,
                        holds=holds,
                    )
            rows, _, handles = world.dispatch([x] * world_size, [scores] * world_size, [ids] * world_size)
            again = world.dispatch_again([x] * world_size, handles)
            torch.cat([*world.combine(rows, handles), *again]).sum().backward()
        channel = world.dispatchers[0].arena.lanes[0].channel
        _launch_others(channel, cfg.pad_multiple, x.detach(), scores.detach(), ids)
        symm_a2a.align_blocks(ids, channel.layout.num_experts, 64)
        _launch_sequences(cfg, world_size, num_tokens, multiprocessors)
    return list({launch.variant: launch for launch in reversed(launches)}.values())[::-1]


def _launch_others(
    channel: Channel, pad_multiple: int, x_TD: torch.Tensor, scores_TK: torch.Tensor, ids_TK: torch.Tensor
) -> None:
    """Launch what a forward and backward may leave out: forms for other sizes, and kernels of their own."""
    from symm_a2a.kernels.assign import assign
    from symm_a2a.kernels.barrier import barrier
    from symm_a2a.kernels.channel import Kind
    from symm_a2a.kernels.count import count, new_sums
    from symm_a2a.kernels.credit import credit
    from symm_a2a.kernels.free import free
    from symm_a2a.kernels.looks import look
    from symm_a2a.kernels.row_count import row_count
    from symm_a2a.kernels.scatter import scatter

    layout = channel.layout
    tally = ids_TK.new_empty(2 * layout.world_size + layout.num_local_experts + 1, dtype=torch.int32)
    copy_of_peer_TW = ids_TK.new_empty((len(ids_TK), layout.world_size), dtype=torch.int32)
    routing = copy_of_peer_TW, torch.empty_like(ids_TK, dtype=torch.int32), tally
    slots = ids_TK, scores_TK.to(layout.score_dtype)
    sums = new_sums(channel, ids_TK)
    count(channel, ids_TK, tally, sums)
    for counted in (sums, None):
        scatter(channel, Kind.DISPATCH, x_TD, *routing, slots=slots, sums=counted)
    row_count(channel, torch.zeros(1, dtype=torch.int64), pad_multiple)
    credit(channel, Kind.COMBINE)
    free(channel, Kind.COMBINE)
    look(channel.local["scatter_ready"], channel.state, 1)
    for counts_WE in (channel.local["counts"], None):
        barrier(channel, counts_WE, arrive=True, leave=True)
    table = ids_TK.new_zeros((layout.num_experts, 2, 2), dtype=torch.int32)
    assign(channel, ids_TK, table, torch.empty_like(ids_TK, dtype=torch.int32))


def _launch_sequences(cfg: symm_a2a.EPConfig, W: int, num_tokens: int, multiprocessors: int) -> None:
    """Launch the exchanges of sequences, for rows of `cfg.hidden_dim`: two heads of every rank."""
    from symm_a2a.kernels.ulysses import RESIDENCY, Kind, Sizes
    from symm_a2a.kernels.ulysses_send import send_heads
    from symm_a2a.kernels.ulysses_take import take_heads
    from symm_a2a.ulysses.lane import SequenceLane

    plain = Sizes(1, num_tokens, 2 * W, cfg.hidden_dim // 2, cfg.dtype, replicas=1)
    shared = Sizes(1, num_tokens, 1, cfg.hidden_dim, cfg.dtype, replicas=W)
    # Nothing runs: memory of any size will do, and none of what is sent is touched.
    lane = SequenceLane.world(W, 1, torch.device("cpu"))[0]
    channel = dataclasses.replace(lane.channel, spins=True, polls=1000, programs=multiprocessors * RESIDENCY)
    token = torch.zeros(1)
    for kind in Kind:
        b, s, h, d = plain.input_shape(kind, W)
        x = token.new_empty((b, s, h, d), dtype=cfg.dtype)
        for given in (x, x.view(b, h, s, d).transpose(1, 2)):
            send_heads(channel, kind, given, plain)
        for sizes in (plain, shared):
            take_heads(channel, kind, x.new_empty(sizes.output_shape(kind, W)), token, sizes)
