"""How much hardware can move at best, as published."""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class Hardware:
    """One rank's device, in a machine of several.

    Attributes:
        name: as in `--hardware`.
        title: what it is.
        memory: bytes a second that its memory reads and writes.
        link: bytes a second to all other ranks together, in one direction.
        per_peer: bytes a second to one other rank, where each pair has a link of its own; None where a switch
            gives all of `link` to any.
        sources: where these figures are published.
    """

    name: str
    title: str
    memory: float
    link: float
    per_peer: float | None
    sources: tuple[str, ...]

    def link_among(self, ranks: int) -> float:
        """Return bytes a second in one direction when a rank sends alike to all of `ranks - 1` others.

        Example:
            >>> HARDWARE["mi300x"].link_among(2) / GB, HARDWARE["mi300x"].link_among(8) / GB
            (64.0, 448.0)
        """
        return self.link if self.per_peer is None else min(self.link, self.per_peer * (ranks - 1))


_TENSORRT_LLM = "https://github.com/NVIDIA/TensorRT-LLM/blob/main/docs/source/blogs/"
_ONE_SIDED = "tech_blog/blog18_Optimizing_MoE_Communication_with_One_Sided_AlltoAll_Over_NVLink.md"
_NVLINK_4 = (
    "https://github.com/mlcommons/inference_results_v4.1/blob/main/closed/NVIDIA/systems/"
    "H200-SXM-141GBx8_TRT_MaxQ.json",
    "https://github.com/NVIDIA/nccl/issues/1264",
)

HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware(
            "h200-copy",
            "H200, memory as fast as a plain copy",
            memory=4300 * GB,
            link=450 * GB,
            per_peer=None,
            sources=(),
        ),
        Hardware(
            "h100",
            "NVIDIA H100 SXM",
            memory=3350 * GB,
            link=450 * GB,
            per_peer=None,
            sources=(
                "https://openmetal.io/resources/blog/how-the-h200-is-built-for-memory-bound-ai-workloads/",
                *_NVLINK_4,
            ),
        ),
        Hardware(
            "h200",
            "NVIDIA H200 SXM",
            memory=4800 * GB,
            link=450 * GB,
            per_peer=None,
            sources=(_TENSORRT_LLM + "H200launch.md", *_NVLINK_4),
        ),
        Hardware(
            "b200",
            "NVIDIA B200",
            memory=8000 * GB,
            link=900 * GB,
            per_peer=None,
            sources=(
                "https://modal.com/gpu-glossary/perf/memory-bandwidth",
                "https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html",
                _TENSORRT_LLM + _ONE_SIDED,
            ),
        ),
        Hardware(
            "mi300x",
            "AMD MI300X",
            memory=5300 * GB,
            link=448 * GB,
            per_peer=64 * GB,
            sources=(
                "https://github.com/ROCm/legacy-rocm-build/blob/develop/docs/conceptual/gpu-arch/mi300.md",
                "https://rocm.blogs.amd.com/software-tools-optimization/mi300x-rccl-xgmi/README.html",
            ),
        ),
    )
}
"""By name. `h200-copy` is an assumption, not published: 90 % of H200's memory, as a plain copy may reach."""
