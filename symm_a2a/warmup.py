"""Every operation of a dispatcher, run once: what has to be compiled is compiled then."""

from __future__ import annotations

from typing import Any

import torch

from symm_a2a.kernels.blocks import INTERPRETED, SMALL_TOKENS


def run_everything(dispatcher: Any, lane: int) -> None:
    """Run each operation in a lane, in every form that has kernels of its own; collective.

    Args:
        dispatcher: `SymmTokenDispatcher`.
        lane: its place in the arena.
    """
    cfg = dispatcher.cfg
    dispatcher.barrier(lane=lane)
    # Where nothing is compiled, one of them stands for both.
    for ids_dtype in (torch.int64,) if INTERPRETED else (torch.int32, torch.int64):
        ids = torch.full((1, cfg.top_k), -1, dtype=ids_dtype, device=dispatcher.device)
        dispatcher.broadcast_counts(ids, lane=lane)
        _train(dispatcher, 1, ids_dtype, lane)
        if cfg.max_tokens_per_rank > SMALL_TOKENS and cfg.capacity != "exact":
            # Other kernels than for a small message.
            _train(dispatcher, SMALL_TOKENS + 1, ids_dtype, lane)


def _train(dispatcher: Any, T: int, ids_dtype: torch.dtype, lane: int) -> None:
    cfg, device = dispatcher.cfg, dispatcher.device
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(T, cfg.hidden_dim, dtype=cfg.dtype, device=device, requires_grad=True)
        scores = torch.zeros(T, cfg.top_k, device=device)
        ids = torch.full((T, cfg.top_k), -1, dtype=ids_dtype, device=device)
        rows, _, handle = dispatcher.dispatch(x, scores, ids, lane=lane)
        again = dispatcher.dispatch_again(x, handle)
        (dispatcher.combine(rows, handle).sum() + again.sum()).backward()
        # A loss on rows alone has no gradients of scores.
        dispatcher.dispatch(x, scores, ids, lane=lane)[0].sum().backward()
