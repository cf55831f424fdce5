"""How fast the links between the GPUs of one machine are, where it is known."""

from __future__ import annotations

import re

# Bytes per second and direction, of one GPU to all its peers, from the vendors' public specifications:
# those of the SXM and OAM modules. PCIe cards, and the two-card bridges of NVL ones, are left out.
PEAKS = {
    "A100-SXM4": 300e9,  # NVLink 3, 12 links of 25 GB/s: "600 GB/s" both ways in NVIDIA's A100 data sheet
    "H100": 450e9,  # NVLink 4, 18 links of 25 GB/s: "900 GB/s" both ways in NVIDIA's H100 data sheet
    "H200": 450e9,  # NVLink 4: "900 GB/s" both ways in NVIDIA's H200 data sheet
    "B200": 900e9,  # NVLink 5, 18 links of 50 GB/s: "1.8 TB/s" both ways in NVIDIA's Blackwell data sheet
    "MI300X": 448e9,  # 7 Infinity Fabric links of 64 GB/s: "128 GB/s" each, both ways, in AMD's data sheet
}


def link_peak(device: str) -> float | None:
    """Return bytes per second that a GPU can send to its peers, or receive; None if it is not known.

    Args:
        device: the name that the driver gives.

    Example:
        >>> link_peak("NVIDIA H100 80GB HBM3"), link_peak("NVIDIA H100 PCIe"), link_peak("NVIDIA H20")
        (450000000000.0, None, None)
    """
    if re.search(r"\b(PCIe|NVL)\b", device):
        return None
    # GB200 and GH200 carry the modules' names in their own, with the same links.
    names = (name for name in PEAKS if re.search(rf"\bG?{name}\b", device))
    return next((PEAKS[name] for name in names), None)
