"""A layer of experts as plain functions, for models whose blocks are not generators."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from symm_a2a.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What a layer does before, between and after its two exchanges.

    Attributes:
        pre: from the layer's input, what to dispatch and what to keep: `(x_TD, scores_TK, ids_TK, kept)`.
            Attention and router.
        experts: `(rows_RD, tokens_per_expert_L) -> y_RD`.
        post: from the combined sums and what was kept the layer's output: `(out_TD, kept)`, with `shared`
            `(out_TD, kept, shared)`.
        shared: `(x_TD) -> Any`, runs while the combine is in flight: shared experts.
    """

    pre: Callable[[Any], tuple[Any, Any, Any, Any]]
    experts: Callable[[Any, Any], Any]
    post: Callable[..., Any]
    shared: Callable[[Any], Any] | None = None


def run_stages(dispatcher: Any, layers: Sequence[Stages], x: Any) -> Generator[Any, Any, Any]:
    """Run layers one after another on a micro-batch, as a generator over its exchanges.

    Args:
        dispatcher: moves the rows.
        layers: the output of each is the input of the next.
        x: the input of the first.
    """
    for layer in layers:
        prepared = layer.pre(x)
        if not isinstance(prepared, tuple) or len(prepared) != 4:
            raise InputError(
                f"expected pre to return (x_TD, scores_TK, ids_TK, kept), got {type(prepared).__name__}"
                + (f" of {len(prepared)}" if isinstance(prepared, tuple) else "")
            )
        x_TD, scores_TK, ids_TK, kept = prepared
        rows, counts, handle = yield dispatcher.dispatch_async(x_TD, scores_TK, ids_TK)
        pending = dispatcher.combine_async(layer.experts(rows, counts), handle)
        beside = () if layer.shared is None else (layer.shared(x_TD),)
        x = layer.post((yield pending), kept, *beside)
    return x
