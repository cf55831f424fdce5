"""A guard that sees every operator: hidden waits of the host, and compute that nobody asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from symm_a2a.errors import SymmA2AError

_READS = (
    "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "allclose", "masked_select", "_unique2",
    "unique_dim", "unique_consecutive", "bincount",
)  # fmt: skip
"""ATen operators whose result, or its shape, the host must wait for."""

_FREE = (
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "set_",
    "record_stream",
)  # fmt: skip
"""ATen operators that are no views, and compute nothing."""

_READERS: dict[Any, str] = {
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.__array__: "numpy",
}
"""Methods that read a tensor in the CPU's memory without an operator; one on a GPU they refuse or copy."""


class HiddenSyncError(SymmA2AError, AssertionError):
    """The host would have waited for the device, and nothing had said that it may."""


class OpGuard:
    """Count the operators that run inside, forward and backward; raise where the host would wait.

    A read that costs nothing on a CPU stops the host on a GPU: `item`, `tolist`, `numpy`, `nonzero`,
    boolean masks, copies between CPU and GPU that are not asynchronous. Custom operators are looked
    into. What Triton's interpreter does to run a kernel is its own business, and counts as one launch.
    `torch.cuda.synchronize`, events and streams are no operators, and are not seen;
    `torch.cuda.set_sync_debug_mode` is for those.

    Args:
        allow_syncs: only note where the host would wait.

    Attributes:
        compute_ops: ATen operators that compute, copy or fill, by name; views and allocations are free.
        launches: Triton kernels, by name.
        host_syncs: what the host would have waited for, in order.

    Example:
        >>> x = torch.ones(3, requires_grad=True)
        >>> with OpGuard() as guard:
        ...     (x.view(3, 1) * 2).sum().backward()
        >>> guard.compute_ops["mul"], guard.compute_ops["view"], guard.host_syncs
        (2, 0, [])
        >>> with OpGuard() as guard:
        ...     x.sum().item()
        Traceback (most recent call last):
        ...
        symm_a2a.testing.guard.HiddenSyncError: expected no wait of the host, got _local_scalar_dense
    """

    def __init__(self, *, allow_syncs: bool = False) -> None:
        self.allow_syncs = allow_syncs
        self.compute_ops: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.host_syncs: list[str] = []
        self._stack = ExitStack()
        self._in_kernel = False

    def __enter__(self) -> OpGuard:
        self._stack.enter_context(_launches_seen_by(self._launch))
        self._stack.enter_context(_Methods(self))
        self._stack.enter_context(_Operators(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def see_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note an ATen operator that is about to run."""
        if self._in_kernel:
            return
        name = func.overloadpacket.__name__
        unsized = name == "repeat_interleave" and kwargs.get("output_size") is None
        if unsized or name in _READS or _crosses(name, args, kwargs) or _selects_by_mask(name, args):
            self.see_sync(name)
        if not func.is_view and name not in _FREE:
            self.compute_ops[name] += 1

    def see_sync(self, name: str) -> None:
        """Note a wait of the host, or refuse it.

        Raises:
            HiddenSyncError: waits are not allowed.
        """
        if self._in_kernel:
            return
        if not self.allow_syncs:
            raise HiddenSyncError(f"expected no wait of the host, got {name}")
        self.host_syncs.append(name)

    def _launch(self, name: str, run: Callable[[], Any]) -> Any:
        self.launches[name] += 1
        self._in_kernel = True
        try:
            return run()
        finally:
            self._in_kernel = False


class _Operators(TorchDispatchMode):
    """Shows a guard the operators, those inside of custom operators too."""

    def __init__(self, guard: OpGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten":
            # Within a custom operator some come whole that have been taken apart outside.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            self._guard.see_operator(func, args, kwargs)
            return func(*args, **kwargs)
        # This mode is off while it handles an operator, and a custom one runs others: back on, and
        # straight to the operator's own code, as a second dispatch would only come here again.
        on_gpu = any(isinstance(a, torch.Tensor) and a.is_cuda for a in args)
        key = torch._C.DispatchKey.CUDA if on_gpu else torch._C.DispatchKey.CPU
        with self, _Methods(self._guard):
            return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


class _Methods(TorchFunctionMode):
    """Shows a guard the methods that read a tensor without an operator."""

    def __init__(self, guard: OpGuard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READERS:
            self._guard.see_sync(_READERS[func])
        return func(*args, **(kwargs or {}))


@contextmanager
def _launches_seen_by(see: Callable[[str, Callable[[], Any]], Any]) -> Iterator[None]:
    """Run every Triton launch through `see`, which gets the kernel's name and the launch."""
    runs: dict[Any, Any] = {kind: kind.run for kind in (JITFunction, InterpretedFunction)}

    def seen(run: Any) -> Any:
        return lambda kernel, *args, **kwargs: see(kernel.__name__, lambda: run(kernel, *args, **kwargs))

    for kind, run in runs.items():
        kind.run = seen(run)
    try:
        yield
    finally:
        for kind, run in runs.items():
            kind.run = run


def _crosses(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a copy goes from a GPU to the CPU or back, and the host waits for it."""
    if name == "copy_":
        target, source, *rest = args
        devices = {target.device.type, source.device.type}
        waits = not (rest[0] if rest else kwargs.get("non_blocking", False))
    elif name == "_to_copy":
        to = kwargs.get("device")
        devices = {args[0].device.type, args[0].device.type if to is None else to.type}
        waits = not kwargs.get("non_blocking", False)
    else:
        return False
    return waits and len(devices) == 2 and "cpu" in devices


def _selects_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an index is a mask, whose number of hits is the result's size."""
    if name not in ("index", "index_put", "index_put_") or not args[1:]:
        return False
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
