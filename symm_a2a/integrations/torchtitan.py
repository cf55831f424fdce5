"""torchtitan: expert-parallel layers whose tokens move through symmetric memory.

    def my_config() -> Trainer.Config:  # in a config registry
        config = deepseek_v3_16b()
        use_symm_a2a(config)
        return config

All else stays torchtitan's own; see docs/integrations/torchtitan.md.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from symm_a2a.checkpointing import checkpoint_ops
from symm_a2a.config import EPConfig
from symm_a2a.dispatcher import SymmTokenDispatcher
from symm_a2a.errors import ClosedError, ConfigError, EnvironmentUnsupportedError, InputError
from symm_a2a.handle import Handle
from symm_a2a.layout import ArenaLayout

try:
    from torchtitan.config import TORCH_DTYPE_MAP, derive, override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, HybridEPTokenDispatcher
    from torchtitan.trainer import Trainer
except ImportError as error:
    raise EnvironmentUnsupportedError(
        f"expected torchtitan 0.3, got {error}; pip install 'symm-a2a[integrations]'"
    ) from error


class ArenaPool:
    """The symmetric memory of a model: an arena for each group and sizes, shared by layers that have them.

    Configs of layers carry it, and copies of a config or of a model carry the same one.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[dist.ProcessGroup, ArenaLayout], SymmTokenDispatcher] = {}
        self._open = ExitStack()
        self._closed = False

    @property
    def dispatchers(self) -> tuple[SymmTokenDispatcher, ...]:
        """One of each arena, oldest first: for `stats`, `record`, `dropped_rows`."""
        return tuple(self._first.values())

    def dispatcher(
        self, cfg: EPConfig, group: dist.ProcessGroup, device: torch.device | None = None
    ) -> SymmTokenDispatcher:
        """Return a layer's dispatcher. The first of its group and sizes allocates, and that is collective.

        Raises:
            ClosedError: the pool was closed.
            ConfigError, EnvironmentUnsupportedError: as for `SymmTokenDispatcher`.
        """
        if self._closed:
            raise ClosedError("expected an open pool, got one that was closed; call use_symm_a2a again")
        key = (group, cfg.layout(group.size()))
        if key in self._first:
            return SymmTokenDispatcher(cfg, arena=self._first[key].arena)
        self._first[key] = self._open.enter_context(SymmTokenDispatcher(cfg, group, device=device))
        return self._first[key]

    def close(self) -> None:
        """Give all symmetric memory back; a second call does nothing. Run the backward first.

        Collective on GPUs, as `SymmTokenDispatcher.close` is, and before the process group is destroyed.

        Raises:
            CapacityError: rows were dropped that no call has reported yet; all has been given back.
        """
        self.__exit__(None, None, None)

    def __deepcopy__(self, memo: dict[int, object]) -> ArenaPool:
        return self

    def __enter__(self) -> ArenaPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._first.clear()
        self._open.__exit__(kind, error, trace)


class SymmEPTokenDispatcher(BaseEPTokenDispatcher):
    """Moves a layer's tokens to the ranks of their experts and back, through symmetric memory.

    Memory is allocated when torchtitan wires the meshes: a model may be built on the meta device.

    Attributes:
        symm: what moves the rows; None until the meshes are wired.
    """

    # What HybridEP's config has is meant the same here, so torchtitan fills it in, and allows CUDA graphs
    # where there is a capacity factor, as it does for HybridEP.
    @dataclass(kw_only=True, slots=True)
    class Config(HybridEPTokenDispatcher.Config):
        """Sizes and policies of one layer; besides those below what torchtitan's HybridEP has.

        `num_experts` and `top_k` are those of the layer, `hidden_dim` is filled in by `use_symm_a2a`,
        `num_max_tokens_per_rank` by torchtitan, and `pad_multiple` is None for no padding. With a
        `non_blocking_capacity_factor` of None what arrives is allocated, for one read of the row count by
        the host; a factor allocates that share of the most rows that could arrive, and the host never
        waits: CUDA graphs need it. 1.0 never drops a row.

        Args:
            dtype: of the token rows, `training.mixed_precision_param`.
            device: where they live; None for the current CUDA device, or for the CPU where there is none
                or the group's backend is gloo.
            overflow: what happens to rows past a capacity factor, as for `EPConfig`.
            timeout: seconds that a rank waits for a peer.
            num_programs: the most programs that a kernel may have on a GPU; None for as many as fill it.
            pool: shared by the layers of a model.
        """

        dtype: torch.dtype = torch.bfloat16
        device: torch.device | None = None
        overflow: Literal["raise", "drop"] = "raise"
        timeout: float = 300.0
        num_programs: int | None = None
        pool: ArenaPool = field(default_factory=ArenaPool)

        def to_dict(self) -> dict[str, Any]:
            """Return plain values, as torchtitan logs them."""
            fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "pool"}
            return fields | {"dtype": str(self.dtype), "device": str(self.device)}

        def ep_config(self, world_size: int) -> EPConfig:
            """Return the sizes and policies for a group of `world_size` ranks.

            Raises:
                ConfigError: a size is missing, or out of range.
            """
            if self.hidden_dim is None or self.num_max_tokens_per_rank is None:
                raise ConfigError(
                    f"expected hidden_dim and num_max_tokens_per_rank, got {self.hidden_dim} and "
                    f"{self.num_max_tokens_per_rank}; call the model config's update_from_config "
                    "after use_symm_a2a, as torchtitan's trainer does"
                )
            return EPConfig(
                num_experts=self.num_experts, top_k=self.top_k, hidden_dim=self.hidden_dim,
                max_tokens_per_rank=self.num_max_tokens_per_rank, dtype=self.dtype,
                # A layer's exchanges run one after the other: a second lane would only take memory.
                num_lanes=1, capacity=self._capacity(world_size, self.num_max_tokens_per_rank),
                pad_multiple=self.pad_multiple or 1, overflow=self.overflow, timeout=self.timeout,
                num_programs=self.num_programs,
            )  # fmt: skip

        def _capacity(self, world_size: int, max_tokens: int) -> int | Literal["exact"]:
            if self.non_blocking_capacity_factor is None:
                return "exact"
            pad, local_experts = self.pad_multiple or 1, self.num_experts // world_size
            most = world_size * max_tokens * min(self.top_k, local_experts)
            rows = math.ceil(most * self.non_blocking_capacity_factor) + local_experts * (pad - 1)
            return -(-rows // pad) * pad

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config
        self.symm: SymmTokenDispatcher | None = None

    def init_buffer(self) -> None:
        """Take symmetric memory from the pool; `wire_meshes(ep_mesh=...)` calls it. Collective over the mesh.

        Raises:
            ConfigError: no mesh, or a size that is missing or does not fit it.
            EnvironmentUnsupportedError: the group's backend cannot work here.
            ClosedError: the pool was closed.
        """
        if self.ep_mesh is None:
            raise ConfigError(
                "expected a mesh of expert-parallel ranks, got None; set parallelism.expert_parallel_degree"
            )
        group, config = self.ep_mesh.get_group(), self.config
        self.symm = config.pool.dispatcher(config.ep_config(group.size()), group, config.device)

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, Handle]:
        """Send every token to the ranks of its experts, as `SymmTokenDispatcher.dispatch` does."""
        symm = self._wired()
        if x_TD.dtype != symm.cfg.dtype:
            raise InputError(
                f"expected tokens of {symm.cfg.dtype}, got {x_TD.dtype}; give use_symm_a2a the dtype that "
                "activations have, by default it is that of training.mixed_precision_param"
            )
        return symm.dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)

    def combine(self, routed_output_RD: Tensor, metadata: Handle, x_TD: Tensor) -> Tensor:
        """Return each token's weighted sum of expert outputs, as `SymmTokenDispatcher.combine` does."""
        return self._wired().combine(routed_output_RD, metadata, x_TD)

    def _wired(self) -> SymmTokenDispatcher:
        if self.symm is None:
            raise ConfigError(
                "expected wire_meshes(ep_mesh=...) before the first dispatch, got a call without"
            )
        return self.symm


class ExchangeSavingAC(SelectiveAC):
    """torchtitan's selective checkpointing, which also saves what exchanges gave: none is run again."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """As `SelectiveAC.Config`."""

    def get_save_ops(self) -> set[Any]:
        """Return the operators whose results are saved."""
        return super().get_save_ops() | set(checkpoint_ops())


@override(
    target=SelectiveAC.Config, exact=True, description="Selective checkpointing that repeats no exchange."
)
def save_exchanges(config: SelectiveAC.Config) -> ExchangeSavingAC.Config:
    """Return the config of `ExchangeSavingAC`, for `override.imports`; `use_symm_a2a` puts it there."""
    return derive(config, ExchangeSavingAC.Config)


def use_symm_a2a(
    config: Trainer.Config,
    *,
    num_max_tokens_per_rank: int | None = None,
    non_blocking_capacity_factor: float | None = None,
    dtype: torch.dtype | None = None,
    overflow: Literal["raise", "drop"] = "raise",
    timeout: float = 300.0,
    num_programs: int | None = None,
) -> ArenaPool:
    """Let all routed experts of a model exchange their tokens through symmetric memory.

    Call it in the function of a config registry, after the model's converters; what the command line
    changes is seen. Selective checkpointing then saves the results of the exchanges.

    Args:
        config: changed in place: the dispatchers of `model_spec.model`, and `override.imports`.
        num_max_tokens_per_rank: the most tokens that a rank passes to a layer; None for torchtitan's own
            sum, from `training` and `parallelism`.
        non_blocking_capacity_factor: see `SymmEPTokenDispatcher.Config`; None for what the dispatchers have
            now, if they have one.
        dtype: of activations; None for `training.mixed_precision_param`.
        overflow: what happens to rows past a capacity factor, as for `EPConfig`.
        timeout: seconds that a rank waits for a peer. The first step compiles: be generous.
        num_programs: the most programs that a kernel may have on a GPU; None for as many as fill it.

    Returns:
        What holds the symmetric memory of models built from the config. Close it before the process group
        is destroyed, or leave it to the end of the process.

    Raises:
        ConfigError: the config has no model with routed experts.
    """
    found = config.model_spec.traverse(RoutedExperts.Config) if config.model_spec else ()
    layers = [layer for _, layer, *_ in found if isinstance(layer, RoutedExperts.Config)]
    if not layers:
        raise ConfigError("expected a model_spec whose model has routed experts, got none")
    pool = ArenaPool()
    sizes = {
        "num_max_tokens_per_rank": num_max_tokens_per_rank,
        "non_blocking_capacity_factor": non_blocking_capacity_factor,
    }
    for layer in layers:
        layer.token_dispatcher = derive(
            layer.token_dispatcher, SymmEPTokenDispatcher.Config, hidden_dim=layer.inner_experts.dim,
            dtype=dtype or TORCH_DTYPE_MAP[config.training.mixed_precision_param], overflow=overflow,
            timeout=timeout, num_programs=num_programs, pool=pool,
            **{name: value for name, value in sizes.items() if value is not None},
        )  # fmt: skip
    saving = f"{save_exchanges.__module__}.{save_exchanges.__name__}"
    if isinstance(config.activation_checkpoint, SelectiveAC.Config) and saving not in config.override.imports:
        config.override.imports.append(saving)
    return pool
