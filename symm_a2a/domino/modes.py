"""The modes that a micro-batch must not hold open while others run: they would reach those too."""

from __future__ import annotations

from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks


def modes() -> dict[str, Any]:
    """Return the thread's modes that change what a computation does, by the names users know."""
    now: dict[str, Any] = {
        "torch.no_grad or enable_grad": torch.is_grad_enabled(),
        "torch.inference_mode": torch.is_inference_mode_enabled(),
        "torch.set_default_dtype": torch.get_default_dtype(),
        "torch.device": torch.get_default_device(),
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.autograd.detect_anomaly": torch.is_anomaly_enabled(),
        "saved_tensors_hooks": _top_saved_tensors_default_hooks(True),
        "a torch function mode": torch._C._len_torch_function_stack(),
        "a torch dispatch mode": torch._C._len_torch_dispatch_stack(),
    }
    attention = torch.backends.cuda
    now["torch.nn.attention.sdpa_kernel"] = (
        attention.flash_sdp_enabled(),
        attention.mem_efficient_sdp_enabled(),
        attention.math_sdp_enabled(),
        attention.cudnn_sdp_enabled(),
    )
    for device in ("cpu", "cuda"):
        on = torch.is_autocast_enabled(device)
        now[f'torch.autocast("{device}")'] = torch.get_autocast_dtype(device) if on else None
    if torch.cuda.is_initialized():
        now["torch.cuda.device"] = torch.cuda.current_device()
        now["torch.cuda.stream"] = torch.cuda.current_stream()
    return now


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the modes that differ."""
    return [name for name, value in after.items() if name in before and before[name] != value]
