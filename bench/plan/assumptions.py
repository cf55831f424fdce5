"""Every number of the plan that is not a size: each with its source, or with the word "assumed".

An assumed number is a guess of what eager PyTorch on a datacenter GPU does; options replace those that
matter most, and `--measured` replaces all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

TERA, GIB = 1e12, 2**30

_ROOFLINE = "https://rooflinenotes.dev/accelerators/"
_AGAINST = (
    "https://raw.githubusercontent.com/alpharomercoma/MI300X-vs-H200/"
    "6077fdc7bfc215171c33435b7cd76ca4c5f2b236/REPORT.md"
)


@dataclass(frozen=True)
class Chip:
    """What `bench.limits.hardware` does not have of a device: that module has memory's speed and the link's.

    Attributes:
        flops: of dense bf16 matrix products, a second, at best.
        capacity: bytes of memory.
        source: where both are published.
    """

    flops: float
    capacity: float
    source: str


CHIPS = {
    "h100": Chip(989 * TERA, 80e9, "https://huggingface.co/hardware/h100, " + _AGAINST),
    "h200": Chip(989 * TERA, 141e9, _AGAINST),
    "b200": Chip(2250 * TERA, 180e9, _ROOFLINE),
    "mi300x": Chip(1307 * TERA, 192e9, _AGAINST),
}
"""By the name of the hardware. An H100 SXM and an H200 have the same multiprocessors."""

LINKED_RANKS = 8
"""Ranks that the published links join: those of one machine. More need a figure of their own."""

# Shares of peaks.

GEMM_EFFICIENCY = 0.75
"""Of the peak, in a large matrix product. Assumed."""

ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.6, 0.5
"""Of the peak, in fused attention. Assumed; at short sequences it is less."""

MEMORY_EFFICIENCY = 0.8
"""Of the memory's peak, in kernels that do little else. Assumed; docs/performance.md has it as a target."""

LINK_EFFICIENCY = 0.7
"""Of the link's peak, in scatters and gathers. Assumed; docs/performance.md has it as a target."""

# How matrix products lose speed when they get small: see gemm.py.

TILE_ROWS = 128
"""Rows of a tile: one that is not full takes as long. Assumed."""

HALF_SPEED_ROWS = 64
"""Rows of one matrix at which a product of full tiles runs at half of its speed. Assumed."""

# Time that is no arithmetic.

LATENCY = 10e-6
"""Seconds from the last byte's leaving until kernels behind the flag run. Assumed."""

LAUNCH_OVERHEAD = 5e-6
"""Seconds of the host for each kernel, eager. Assumed."""

CONTENTION = 0.15
"""The share of compute's speed lost while a launch sends: 20 of 132 multiprocessors. Assumed; with
`EPConfig(num_programs=)` a launch takes no more than it is given."""

KERNELS = {"pre": 16, "experts": 4, "shared": 4, "post": 2}
"""Kernels of each stage in the forward; in the backward twice as many. Assumed."""

LAUNCH_KERNELS, JOIN_KERNELS = 8, 4
"""Kernels in whose time the host launches, or joins, an exchange: one to three and their checks. Assumed."""

ROW_PASSES = {"pre": 10, "post": 3}
"""Times that elementwise kernels read or write a token's row of D elements; in the backward twice. Assumed:
two norms, two residual sums, rotations."""

ACTIVATION_PASSES, ACTIVATION_PASSES_BACKWARD = 3, 6
"""Times that the experts' activation reads or writes a row of I elements: gate, up, product. Assumed."""

BYTES_PER_PARAMETER = 6.0
"""Weights in bf16 and gradients in fp32; the optimizer's state is elsewhere. Assumed."""

WORTHWHILE = 0.03
"""The gain from which on Domino is said to help: below, what is not in the model may decide. Assumed."""

LITTLE_COMMUNICATION = 0.05
"""The share of a step spent waiting for exchanges below which there is too little to hide. Assumed."""

USABLE_MEMORY = 0.9
"""Of a device's memory; contexts, libraries and what an allocator cannot use have the rest. Assumed."""
