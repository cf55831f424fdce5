"""Hugging Face transformers: expert-parallel models whose tokens move through symmetric memory.

    pool = register(max_tokens_per_rank=4096)  # under the name "symm_a2a"
    config = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="symm_a2a")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, distributed_config=config)
    ...
    pool.close()

Sharding, loading and the experts themselves stay transformers' own; see docs/integrations/transformers.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from symm_a2a.config import EPConfig
from symm_a2a.dispatcher import SymmTokenDispatcher
from symm_a2a.errors import ClosedError, EnvironmentUnsupportedError, InputError


class DispatcherPool:
    """The dispatchers of all models that were built under one registered name.

    A dispatcher is made where a layer first needs one of its group, sizes and dtype, and serves every
    layer, of every model, that has the same. So the first forward is collective over the group.

    Args:
        policies: of every dispatcher; its sizes are replaced by those of the layers.
    """

    def __init__(self, policies: EPConfig) -> None:
        self._policies = policies
        self._dispatchers: dict[tuple[object, ...], SymmTokenDispatcher] = {}
        self._open = ExitStack()
        self._closed = False

    @property
    def dispatchers(self) -> tuple[SymmTokenDispatcher, ...]:
        """Those made so far, oldest first: for `stats`, `record`, `dropped_rows`."""
        return tuple(self._dispatchers.values())

    def get(
        self, group: dist.ProcessGroup, num_experts: int, x_TD: Tensor, topk_ids_TK: Tensor
    ) -> SymmTokenDispatcher:
        """Return the dispatcher for a layer's tensors; the first time, make it, collectively.

        Args:
            group: the expert-parallel group.
            num_experts: E, of all its ranks together.
            x_TD: tokens; D, the dtype and the device count.
            topk_ids_TK: expert ids; K counts.

        Raises:
            InputError: more tokens than the pool was registered for; no peer has been touched.
            ConfigError, EnvironmentUnsupportedError: as for `SymmTokenDispatcher`.
            ClosedError: the pool was closed.
        """
        self.require_open()
        tokens, most = x_TD.shape[0], self._policies.max_tokens_per_rank
        if tokens > most:
            raise InputError(
                f"expected at most max_tokens_per_rank = {most} tokens on a rank, got {tokens}; pass fewer, "
                "or register, before the model is built, with max_tokens_per_rank = batch size * sequence "
                "length of the largest batch (a prompt whole), over the ranks of a tensor-parallel group"
            )
        sizes = (num_experts, topk_ids_TK.shape[1], x_TD.shape[1], x_TD.dtype)
        key = (group, *sizes)
        if key not in self._dispatchers:
            E, K, D, dtype = sizes
            cfg = replace(self._policies, num_experts=E, top_k=K, hidden_dim=D, dtype=dtype)
            made = self._open.enter_context(SymmTokenDispatcher(cfg, group, device=x_TD.device))
            self._dispatchers[key] = made
        return self._dispatchers[key]

    def require_open(self) -> None:
        """Raise `ClosedError` after `close`."""
        if self._closed:
            raise ClosedError(
                "expected an open pool, got one that was closed; register again, then build the model again"
            )

    def close(self) -> None:
        """Give all symmetric memory back; a second call does nothing. Run the backward first.

        Collective on GPUs, as `SymmTokenDispatcher.close` is. The name stays registered, and a model that
        is built under it raises `ClosedError`, until it is registered again.

        Raises:
            CapacityError: rows were dropped that no call has reported yet; all has been given back.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> DispatcherPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._dispatchers.clear()
        self._open.__exit__(kind, error, trace)


class _SymmetricEP:
    """What `register` adds to transformers' `EPImplementation`: one experts module's way to its tokens."""

    pool: DispatcherPool
    experts_forward: Callable[..., Tensor]
    num_local_experts: int
    ep_mesh: DeviceMesh
    tp_mesh: DeviceMesh

    def __init__(self, experts: torch.nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        self.pool.require_open()
        super().__init__(experts, ep_mesh, tp_mesh)  # pyright: ignore[reportCallIssue]

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the experts' weighted sum for each token of this rank, `(T, D)`.

        Args:
            hidden_states: `(T, D)`.
            top_k_index: `(T, K)`, expert ids; one outside `[0, num_experts)` masks its slot.
            top_k_weights: `(T, K)`, of any floating dtype.
        """
        if self.tp_mesh.size() == 1:
            return self._exchange(hidden_states, top_k_index, top_k_weights)
        # The ranks of a tensor-parallel group hold the same tokens, and each sends a share of them.
        shares = (self._share(tensor) for tensor in (hidden_states, top_k_index, top_k_weights))
        return self._gather(self._exchange(*shares), hidden_states.shape)

    def _exchange(self, x_TD: Tensor, topk_ids_TK: Tensor, scores_TK: Tensor) -> Tensor:
        num_experts = self.num_local_experts * self.ep_mesh.size()
        dispatcher = self.pool.get(self.ep_mesh.get_group(), num_experts, x_TD, topk_ids_TK)
        topk_ids_TK = topk_ids_TK.masked_fill(topk_ids_TK >= num_experts, -1)
        rows_RD, tokens_per_expert_L, handle = dispatcher.dispatch(x_TD, scores_TK, topk_ids_TK)
        return dispatcher.combine(self._run_experts(rows_RD, tokens_per_expert_L), handle)

    def _run_experts(self, rows_RD: Tensor, tokens_per_expert_L: Tensor) -> Tensor:
        """Run this rank's experts on rows that are sorted by them; scores are for `combine`."""
        num_rows = rows_RD.shape[0]
        if num_rows == 0:
            rows_RD = F.pad(rows_RD, (0, 0, 0, 1))
        places = torch.arange(rows_RD.shape[0], device=rows_RD.device)
        # The rows behind the last expert's get the id that transformers' experts skip, L.
        ids_R = torch.searchsorted(tokens_per_expert_L.cumsum(0), places, right=True)
        # One zero row where none arrived: an expert weight without a gradient, on this rank alone, would keep
        # FSDP from a reduction that the other ranks wait for.
        ids_R[:1].clamp_(max=self.num_local_experts - 1)
        y_RD = self.experts_forward(rows_RD, ids_R[:, None], rows_RD.new_ones(rows_RD.shape[0], 1))
        return y_RD[:num_rows].to(rows_RD.dtype)

    def _share(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of what its tensor-parallel group holds; the backward gathers them."""
        whole = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(0)]).to_local()

    def _gather(self, share: Tensor, shape: torch.Size) -> Tensor:
        """Return the shares of a tensor-parallel group as one tensor; the backward takes this rank's."""
        parts = DTensor.from_local(
            share, self.tp_mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1)
        )
        return parts.full_tensor()


def register(
    name: str = "symm_a2a",
    *,
    max_tokens_per_rank: int,
    capacity: int | float | Literal["exact"] = "exact",
    pad_multiple: int = 1,
    overflow: Literal["raise", "drop"] = "raise",
    timeout: float = 60.0,
    num_programs: int | None = None,
) -> DispatcherPool:
    """Register an `EPImplementation` that `DistributedConfig(ep_implementation=name)` then names.

    Args:
        name: of the implementation; a name that is taken is taken over, for models built from now on.
        max_tokens_per_rank: the most tokens that a rank passes to a layer at once: batch size * sequence
            length, a prompt whole, divided by the ranks of a tensor-parallel group.
        capacity: as for `EPConfig`, and so are the others. A static one for CUDA graphs and `torch.compile`.
        pad_multiple: rows that each expert's are padded to a multiple of.
        overflow: what happens to rows past a static capacity.
        timeout: seconds that a rank waits for a peer.
        num_programs: the most programs that a kernel may have on a GPU.

    Returns:
        What holds the symmetric memory of the models built under this name; to be closed, or used in a
        `with`.

    Raises:
        EnvironmentUnsupportedError: no transformers, or one without `EPImplementationInterface`.
        ConfigError: a value is out of range.
    """
    try:
        from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    except ImportError as error:
        raise EnvironmentUnsupportedError(
            "expected transformers with EPImplementationInterface, 5.24 or newer, got "
            f"{error}; pip install 'symm-a2a[integrations]'"
        ) from error
    # transformers runs a layer's exchanges one after the other: a second lane would only take memory.
    policies = EPConfig(
        num_experts=1, top_k=1, hidden_dim=1, num_lanes=1, max_tokens_per_rank=max_tokens_per_rank,
        capacity=capacity, pad_multiple=pad_multiple, overflow=overflow, timeout=timeout,
        num_programs=num_programs,
    )  # fmt: skip
    pool = DispatcherPool(policies)
    bases: tuple[type[Any], ...] = (_SymmetricEP, EPImplementation)
    EPImplementationInterface.register(name, type("SymmetricEP", bases, {"pool": pool}))
    return pool
