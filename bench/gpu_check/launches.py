"""Kernel launches as they are made: seen, recorded, captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from symm_a2a.kernels.channel import Kind

Arguments = dict[str, Any]
See = Callable[[Any, Arguments, Callable[..., Any]], Any]


@contextlib.contextmanager
def seen_by(see: See) -> Iterator[None]:
    """Run every launch inside through `see`.

    It gets the kernel, its arguments by name, and what launches it: as it is, or with keywords changed.
    """
    runs: dict[Any, Any] = {kind: kind.run for kind in (JITFunction, InterpretedFunction)}

    def through(run: Any) -> Any:
        def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            return see(kernel, arguments, lambda **changes: run(kernel, *args, **(kwargs | changes)))

        return launch

    for kind, run in runs.items():
        kind.run = through(run)
    try:
        yield
    finally:
        for kind, run in runs.items():
            kind.run = run


def traffic_name(kernel: Any, arguments: Arguments) -> str:
    """Return a launch's name in `bench.limits.traffic`."""
    name = kernel.__name__.strip("_").removesuffix("_kernel")
    backward = {
        "scatter": arguments.get("KIND") == Kind.COMBINE_BACKWARD,
        "gather": arguments.get("KIND") == Kind.DISPATCH_BACKWARD,
        "finish": arguments.get("KIND") == Kind.DISPATCH_BACKWARD,
        "expand_grad": True,
    }.get(name, False)
    if arguments.get("KIND") in (Kind.DISPATCH_AGAIN, Kind.DISPATCH_AGAIN_BACKWARD):
        return f"{name} again"
    return f"{name.removesuffix('_grad')} of gradients" if backward else name.replace("_again", " again")


def without_running(kernel: Any, arguments: Arguments, launch: Callable[..., Any]) -> Any:
    """Compile what is launched, and leave it at that."""
    del kernel, arguments
    return launch(warmup=True)


def repeatable(device: str, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Run; return the result, and what runs it again into the same tensors.

    On a GPU that is a captured graph, whose result is undefined until the first replay. On a CPU it is the
    launches, with the arguments they had.
    """
    return _captured(run) if device != "cpu" else _recorded(run)


def _captured(run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    # Beside the stream of before, as a capture asks for: what is compiled or cached first is no part of it.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return result, graph.replay


def _recorded(run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    launches: list[Callable[..., Any]] = []

    def see(kernel: Any, arguments: Arguments, launch: Callable[..., Any]) -> Any:
        del kernel, arguments
        launches.append(launch)
        return launch()

    with seen_by(see):
        result = run()

    def again() -> None:
        for launch in launches:
            launch()

    return result, again
