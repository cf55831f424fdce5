"""Checks of a dispatcher's arguments, the same for every way to move the rows.

Only attributes are compared: no tensor is read, so a check costs no device work and no host
synchronisation, and `torch.compile` traces it away. What the tensors hold (ids out of range) is
for the dispatcher, which knows when the values are on the host.
"""

from __future__ import annotations

import torch

from symm_a2a.config import EPConfig
from symm_a2a.errors import InputError

ID_DTYPES = (torch.int32, torch.int64)


def check_dispatch(
    cfg: EPConfig,
    device: torch.device,
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    num_local_tokens_per_expert_E: torch.Tensor | None = None,
) -> None:
    """Raise unless the arguments of a dispatch fit the configuration.

    Args:
        cfg: sizes and dtype.
        device: where the dispatcher's rows live, with an index if it is a CUDA device.
        x_TD: `(T, D)` of `cfg.dtype`, T at most `cfg.max_tokens_per_rank`.
        scores_TK: `(T, K)` of any floating point dtype.
        topk_ids_TK: `(T, K)` of int32 or int64.
        num_local_tokens_per_expert_E: `(E,)` of any dtype, or None. Routers that count give it; the
            ids say the same and more.

    Raises:
        InputError: a shape, dtype or device that does not fit; the message has both.
    """
    for name, tensor in (("x_TD", x_TD), ("scores_TK", scores_TK), ("topk_ids_TK", topk_ids_TK)):
        _check_tensor(name, tensor)
    if x_TD.dim() != 2 or x_TD.shape[1] != cfg.hidden_dim:
        raise InputError(f"expected x_TD of shape (T, {cfg.hidden_dim}), got {tuple(x_TD.shape)}")
    num_tokens = x_TD.shape[0]
    if num_tokens > cfg.max_tokens_per_rank:
        raise InputError(
            f"expected at most max_tokens_per_rank = {cfg.max_tokens_per_rank} tokens, got {num_tokens}"
        )
    if x_TD.dtype != cfg.dtype:
        raise InputError(f"expected x_TD of dtype {cfg.dtype}, got {x_TD.dtype}")
    for name, tensor in (("scores_TK", scores_TK), ("topk_ids_TK", topk_ids_TK)):
        if tensor.shape != (num_tokens, cfg.top_k):
            raise InputError(
                f"expected {name} of shape ({num_tokens}, {cfg.top_k}), got {tuple(tensor.shape)}"
            )
    if not scores_TK.dtype.is_floating_point:
        raise InputError(f"expected scores_TK of a floating point dtype, got {scores_TK.dtype}")
    check_ids(cfg, device, topk_ids_TK)
    for name, tensor in (("x_TD", x_TD), ("scores_TK", scores_TK)):
        if tensor.device != device:
            raise InputError(f"expected {name} on {device}, got {tensor.device}")
    counts_E = num_local_tokens_per_expert_E
    if counts_E is not None and counts_E.shape != (cfg.num_experts,):
        raise InputError(
            f"expected num_local_tokens_per_expert_E of shape ({cfg.num_experts},), "
            f"got {tuple(counts_E.shape)}"
        )


def check_ids(cfg: EPConfig, device: torch.device, topk_ids_TK: torch.Tensor) -> None:
    """Raise unless the expert ids of a dispatch fit the configuration.

    Args:
        cfg: sizes.
        device: where the dispatcher's rows live.
        topk_ids_TK: `(T, K)` of int32 or int64, T at most `cfg.max_tokens_per_rank`.

    Raises:
        InputError: a shape, dtype or device that does not fit; the message has both.
    """
    _check_tensor("topk_ids_TK", topk_ids_TK)
    if topk_ids_TK.dim() != 2 or topk_ids_TK.shape[1] != cfg.top_k:
        raise InputError(f"expected topk_ids_TK of shape (T, {cfg.top_k}), got {tuple(topk_ids_TK.shape)}")
    if topk_ids_TK.shape[0] > cfg.max_tokens_per_rank:
        raise InputError(
            f"expected at most max_tokens_per_rank = {cfg.max_tokens_per_rank} tokens, "
            f"got {topk_ids_TK.shape[0]}"
        )
    if topk_ids_TK.dtype not in ID_DTYPES:
        raise InputError(f"expected topk_ids_TK of dtype int32 or int64, got {topk_ids_TK.dtype}")
    if topk_ids_TK.device != device:
        raise InputError(f"expected topk_ids_TK on {device}, got {topk_ids_TK.device}")


def check_again(cfg: EPConfig, device: torch.device, x_TD: torch.Tensor, num_tokens: int) -> None:
    """Raise unless a second dispatch's rows are as many as the first's, and of the same kind.

    Args:
        cfg: sizes and dtype.
        device: where the dispatcher's rows live.
        x_TD: `(num_tokens, D)` of `cfg.dtype`.
        num_tokens: T of the first dispatch.

    Raises:
        InputError: a shape, dtype or device that does not fit; the message has both.
    """
    _check_rows("x_TD", cfg, device, x_TD, num_tokens)


def check_combine(cfg: EPConfig, device: torch.device, y_RD: torch.Tensor, num_rows: int) -> None:
    """Raise unless a combine's rows are as many, and of the kind, that the dispatch gave out.

    Args:
        cfg: sizes and dtype.
        device: where the dispatcher's rows live.
        y_RD: `(num_rows, D)` of `cfg.dtype`.
        num_rows: R of the dispatch.

    Raises:
        InputError: a shape, dtype or device that does not fit; the message has both.
    """
    _check_rows("y_RD", cfg, device, y_RD, num_rows)


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise InputError(f"expected {name} to be a tensor, got {type(value).__name__}")


def _check_rows(name: str, cfg: EPConfig, device: torch.device, rows: torch.Tensor, number: int) -> None:
    _check_tensor(name, rows)
    if rows.shape != (number, cfg.hidden_dim):
        raise InputError(f"expected {name} of shape ({number}, {cfg.hidden_dim}), got {tuple(rows.shape)}")
    if rows.dtype != cfg.dtype:
        raise InputError(f"expected {name} of dtype {cfg.dtype}, got {rows.dtype}")
    if rows.device != device:
        raise InputError(f"expected {name} on {device}, got {rows.device}")
