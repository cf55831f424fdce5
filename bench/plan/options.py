"""What `python -m bench plan` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GB, TERA, MICRO = 1e9, 1e12, 1e-6


@dataclass(frozen=True, kw_only=True)
class Options:
    """Will Domino pay? Replay the schedule that it really makes over a model of a machine.

    Everything that is printed is computed, nothing is measured: sizes and published peaks, and the
    assumptions of bench/plan/assumptions.py. A step is the forward and backward of the layers of one rank;
    embedding, head, dense layers, optimizer and the reduction of gradients are not in it. With --measured the
    times of your own run take the place of all that.
    """

    shape: str = "olmoe"
    """Named model: olmoe, deepseek-v3, qwen3-moe, mixtral."""
    tokens: int = 4096
    """Tokens of each rank in a batch; a multiple of --context."""
    ranks: int = 8
    """EP: the ranks that the experts are shared out among."""
    layers: int | Literal["all"] = 4
    """Layers with experts on a rank, as in a stage of a pipeline; all is the whole model."""
    context: int = 1024
    """Tokens of a sequence; a micro-batch has whole sequences."""
    hardware: str = "h100"
    """Device: h100, h200, b200, mi300x."""
    micro_batches: tuple[int, ...] = (2, 3, 4)
    """Numbers of micro-batches to try."""
    lanes: int = 2
    """The most exchanges in flight at once; each has memory; a micro-batch too many runs alone."""
    batches: Literal["split", "accumulated"] = "split"
    """Micro-batches are parts of one batch, or whole batches whose gradients would accumulate anyway."""
    capacity: Literal["exact", "static"] = "exact"
    """Rows a rank has room for: what arrives, and the host waits for its number; or twice the mean."""
    checkpoint: bool = False
    """Each layer is a checkpoint of its own: its exchanges are joined before the next layer, and repeated."""
    imbalance: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0)
    """Spreads to try: the coefficient of variation of tokens per expert."""

    hidden: int | None = None
    """D, in place of the named model's; so the others here."""
    experts: int | None = None
    """E."""
    top_k: int | None = None
    """K."""
    intermediate: int | None = None
    """Elements within an expert."""
    shared: int | None = None
    """Shared experts."""
    heads: int | None = None
    """Query heads of grouped attention."""
    kv_heads: int | None = None
    """Key and value heads."""
    head_dim: int | None = None
    """Elements of a head."""

    tflops: float | None = None
    """Dense bf16 peak, in place of the hardware's; so the others here."""
    memory_bandwidth: float | None = None
    """GB/s of the memory at its peak."""
    link: float | None = None
    """GB/s to all other ranks together, in one direction, at its peak."""
    memory: float | None = None
    """GB of memory."""
    latency: float | None = None
    """Microseconds from the last byte's leaving until a reader may go on."""
    overhead: float | None = None
    """Microseconds of the host for each kernel."""
    contention: float | None = None
    """Share of its speed that compute loses while a launch sends."""
    gemm_efficiency: float | None = None
    """Share of the peak in large matrix products."""
    link_efficiency: float | None = None
    """Share of the link's peak that exchanges reach."""
    memory_efficiency: float | None = None
    """Share of the memory's peak that kernels reach."""
    half_speed_rows: float | None = None
    """Rows of a matrix at which a product runs at half of its speed."""
    bytes_per_parameter: float | None = None
    """Bytes kept of each weight: itself, its gradient, and whatever else."""

    profile: Path | None = None
    """JSON file with figures of a machine in units of one: flops, memory, link, capacity, latency, ..."""
    measured: Path | None = None
    """JSON file with the seconds of stages, launches and joins; see bench/plan/measured_file.py."""
    out: Path = Path("out")
    """Folder of plan.png and plan.trace.json, the predicted timelines."""
    json: Path | None = None
    """File to write all figures to, as one JSON object."""

    def check(self) -> None:
        """Check what can be checked without knowing the model.

        Raises:
            ValueError: says what was expected, and what came.
        """
        for name, least in (("tokens", 1), ("ranks", 2), ("context", 1), ("lanes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"expected --{name} of at least {least}, got {getattr(self, name)}")
        if self.layers != "all" and self.layers < 1:
            raise ValueError(f"expected --layers of at least 1, got {self.layers}")
        if not self.micro_batches or min(self.micro_batches) < 2:
            raise ValueError(f"expected --micro-batches of at least 2, got {self.micro_batches}")
        if any(not variation >= 0 for variation in self.imbalance):
            raise ValueError(f"expected --imbalance of at least 0, got {self.imbalance}")
        if self.tokens % self.context and self.measured is None:
            raise ValueError(
                f"expected --tokens to be whole sequences of --context {self.context}, got {self.tokens}; "
                "lower --context, or choose a multiple"
            )
