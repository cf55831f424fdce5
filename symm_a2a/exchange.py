"""The four operations as launches and joins: which kernels run, in which order.

A launch opens the lane, runs the kernels that write to peers and publish; a join waits,
runs the kernels that read, and frees the sections. Between the two, other work may run,
other lanes included: with `beside=True` the launch is on the lane's own stream, where there are
streams. In a virtual world every rank launches before any rank joins.

Everything an exchange returns is ordinary memory: the sections may be overwritten as soon as
a join has run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from symm_a2a.kernels.assign import assign
from symm_a2a.kernels.barrier import barrier
from symm_a2a.kernels.blocks import SMALL_TOKENS
from symm_a2a.kernels.channel import Kind
from symm_a2a.kernels.count import count, new_sums
from symm_a2a.kernels.expand import expand
from symm_a2a.kernels.expand_again import expand_again
from symm_a2a.kernels.expand_grad import expand_grad
from symm_a2a.kernels.finish import finish
from symm_a2a.kernels.gather import gather
from symm_a2a.kernels.scatter import scatter
from symm_a2a.lane import Lane

EXACT = -1
"""The capacity that stands for as many rows as arrive."""


class Routing(NamedTuple):
    """Where a dispatch put its copies: all that later exchanges need, in memory of its own.

    Attributes:
        copy_of_peer_TW: int32, at the origin: each token's copy at each peer, or -1.
        copy_of_slot_TK: int32, at the origin: `peer * C + copy` of each slot, or -1.
        row_of_copy: int32 `(W, C, K)`, at the experts: each received copy's rows, its slots' in their
            order, then -1; -1 too for a slot that a static capacity has dropped.
        score_of_copy: `(W, C, K)`, at the experts: the scores of those slots; differentiable.
        tally: int32 `(2 W + L + 1,)`: copies sent to each peer, copies received from each
            peer, rows of each local expert, the dispatch's epoch.
    """

    copy_of_peer_TW: torch.Tensor
    copy_of_slot_TK: torch.Tensor
    row_of_copy: torch.Tensor
    score_of_copy: torch.Tensor
    tally: torch.Tensor


class Dispatched(NamedTuple):
    """What a dispatch gives: rows `(R, D)`, int32 `(L,)` padded counts, routing, token."""

    rows_RD: torch.Tensor
    tokens_per_expert_L: torch.Tensor
    routing: Routing
    token: torch.Tensor


@dataclass(frozen=True)
class DispatchFlight:
    """A dispatch between launch and join."""

    lane: Lane
    routing: Routing
    capacity: int
    pad_multiple: int
    x_TD: torch.Tensor
    ledger: torch.Tensor | None


def _token(like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(1, dtype=torch.float32)


def launch_dispatch(
    lane: Lane,
    x_TD: torch.Tensor,
    scores_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    capacity: int,
    pad_multiple: int,
    table: torch.Tensor | None = None,
    ledger: torch.Tensor | None = None,
    *,
    beside: bool = False,
) -> DispatchFlight:
    """Send every token's row to the ranks of its experts.

    Args:
        lane: to use.
        x_TD: rows.
        scores_TK: weights of the slots.
        ids_TK: experts, or -1.
        capacity: rows to give out, or `EXACT`.
        pad_multiple: each expert's rows are padded to a multiple of it.
        table: a `Placement`'s for this rank; None where experts are places.
        ledger: see `expand`.
        beside: see `Lane.launch`.
    """
    layout = lane.layout
    W, C, K = layout.world_size, layout.max_tokens, layout.top_k
    x_TD, ids_TK = x_TD.contiguous(), ids_TK.contiguous()
    scores_TK = scores_TK.to(layout.score_dtype).contiguous()
    T = x_TD.shape[0]
    routing = Routing(
        copy_of_peer_TW=ids_TK.new_empty((T, W), dtype=torch.int32),
        copy_of_slot_TK=ids_TK.new_empty((T, K), dtype=torch.int32),
        row_of_copy=ids_TK.new_empty((W, C, K), dtype=torch.int32),
        score_of_copy=scores_TK.new_empty((W, C, K)),
        tally=ids_TK.new_empty(2 * W + layout.num_local_experts + 1, dtype=torch.int32),
    )
    # A small message counts in its scatter. With "exact" the counts go ahead: the host waits for them.
    counts_first = T > SMALL_TOKENS or capacity == EXACT
    places_TK = ids_TK if table is None else torch.empty_like(ids_TK, dtype=torch.int32)
    sums = new_sums(lane.channel, places_TK) if counts_first else None
    holds = (x_TD, scores_TK, ids_TK, places_TK, *(sums or ()), *routing)
    with lane.launch(Kind.DISPATCH, *holds, kernel_waits=counts_first, beside=beside):
        if table is not None:
            assign(lane.channel, ids_TK, table, places_TK)
        if sums is not None:
            count(lane.channel, places_TK, routing.tally, sums, Kind.DISPATCH, ledger)
        if capacity == EXACT:
            lane.start_row_count(pad_multiple)
        scatter(
            lane.channel, Kind.DISPATCH, x_TD,
            routing.copy_of_peer_TW, routing.copy_of_slot_TK, routing.tally,
            slots=(places_TK, scores_TK), sums=sums, ledger=ledger,
        )  # fmt: skip
    return DispatchFlight(lane, routing, capacity, pad_multiple, x_TD, ledger)


def join_dispatch(flight: DispatchFlight) -> Dispatched:
    """Take the rows that a dispatch brought here, in (expert, origin rank, origin slot) order."""
    lane, routing = flight.lane, flight.routing
    layout = lane.layout
    exact, x_TD = flight.capacity == EXACT, flight.x_TD
    with lane.join(Kind.DISPATCH):
        num_rows = lane.row_count(flight.pad_multiple) if exact else flight.capacity
        rows_RD = x_TD.new_empty((num_rows, layout.hidden_dim))
        tokens_per_expert_L = x_TD.new_empty(layout.num_local_experts, dtype=torch.int32)
        token = _token(x_TD)
        lane.arrive(Kind.DISPATCH)
        expand(
            lane.channel, rows_RD, tokens_per_expert_L, routing.row_of_copy, routing.score_of_copy,
            routing.tally, token, flight.ledger, pad_multiple=flight.pad_multiple, exact=exact,
        )  # fmt: skip
    return Dispatched(rows_RD, tokens_per_expert_L, routing, token)


def launch_combine(lane: Lane, y_RD: torch.Tensor, routing: Routing, *, beside: bool = False) -> torch.Tensor:
    """Send back, for every copy received, the weighted sum of its rows; return the rows sent."""
    y_RD = y_RD.contiguous()
    with lane.launch(Kind.COMBINE, y_RD, *routing, beside=beside):
        gather(lane.channel, Kind.COMBINE, y_RD, routing.row_of_copy, routing.score_of_copy, routing.tally)
    return y_RD


def join_combine(lane: Lane, y_RD: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum what came back for each token; return `(T, D)` and a token."""
    return _join_sums(lane, Kind.COMBINE, y_RD, routing)


def launch_combine_backward(
    lane: Lane, grad_out_TD: torch.Tensor, routing: Routing, *, beside: bool = False
) -> torch.Tensor:
    """Send each token's output gradient where its row went; return the rows sent."""
    return _launch_copies(lane, Kind.COMBINE_BACKWARD, grad_out_TD, routing, beside)


def join_combine_backward(
    lane: Lane, y_RD: torch.Tensor, routing: Routing, pad_multiple: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the rows `(R, D)` and of their scores `(W, C, K)`, and a token."""
    y_RD = y_RD.contiguous()
    grad_y_RD, token = torch.empty_like(y_RD), _token(y_RD)
    grad_score_of_copy = torch.empty_like(routing.score_of_copy)
    with lane.join(Kind.COMBINE_BACKWARD):
        lane.arrive(Kind.COMBINE_BACKWARD, routing.tally)
        expand_grad(
            lane.channel, grad_y_RD, grad_score_of_copy, y_RD, routing.row_of_copy, routing.score_of_copy,
            routing.tally, token, pad_multiple=pad_multiple,
        )  # fmt: skip
    return grad_y_RD, grad_score_of_copy, token


def launch_dispatch_backward(
    lane: Lane,
    grad_rows_RD: torch.Tensor,
    grad_score_of_copy: torch.Tensor | None,
    routing: Routing,
    *,
    beside: bool = False,
) -> torch.Tensor:
    """Send back each copy's summed row gradients, its score gradients with them."""
    grad_rows_RD = grad_rows_RD.contiguous()
    scores = () if grad_score_of_copy is None else (grad_score_of_copy.contiguous(),)
    with lane.launch(Kind.DISPATCH_BACKWARD, grad_rows_RD, *scores, *routing, beside=beside):
        gather(
            lane.channel, Kind.DISPATCH_BACKWARD, grad_rows_RD,
            routing.row_of_copy, scores[0] if scores else None, routing.tally,
        )  # fmt: skip
    return grad_rows_RD


def join_dispatch_backward(
    lane: Lane, grad_rows_RD: torch.Tensor, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of the tokens `(T, D)` and of their scores `(T, K)`, and a token."""
    T, K = routing.copy_of_slot_TK.shape
    grad_x_TD = grad_rows_RD.new_empty((T, lane.layout.hidden_dim))
    grad_scores_TK = routing.score_of_copy.new_empty((T, K))
    token = _token(grad_rows_RD)
    with lane.join(Kind.DISPATCH_BACKWARD):
        lane.arrive(Kind.DISPATCH_BACKWARD, routing.tally)
        finish(
            lane.channel, Kind.DISPATCH_BACKWARD, grad_x_TD, token,
            routing.copy_of_peer_TW, routing.copy_of_slot_TK, routing.tally, grad_scores_TK,
        )  # fmt: skip
    return grad_x_TD, grad_scores_TK, token


def launch_dispatch_again(
    lane: Lane, x_TD: torch.Tensor, routing: Routing, *, beside: bool = False
) -> torch.Tensor:
    """Send every token's row where a dispatch sent another one; return the rows sent."""
    return _launch_copies(lane, Kind.DISPATCH_AGAIN, x_TD, routing, beside)


def join_dispatch_again(
    lane: Lane, x_TD: torch.Tensor, routing: Routing, num_rows: int, pad_multiple: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the rows that a second dispatch brought here, in the places of the first; return a token too."""
    rows_RD, token = x_TD.new_empty((num_rows, lane.layout.hidden_dim)), _token(x_TD)
    with lane.join(Kind.DISPATCH_AGAIN):
        lane.arrive(Kind.DISPATCH_AGAIN, routing.tally)
        expand_again(
            lane.channel, rows_RD, routing.row_of_copy, routing.tally, token, pad_multiple=pad_multiple
        )
    return rows_RD, token


def launch_dispatch_again_backward(
    lane: Lane, grad_rows_RD: torch.Tensor, routing: Routing, *, beside: bool = False
) -> torch.Tensor:
    """Send back each copy's summed row gradients; return the rows sent."""
    grad_rows_RD = grad_rows_RD.contiguous()
    with lane.launch(Kind.DISPATCH_AGAIN_BACKWARD, grad_rows_RD, *routing, beside=beside):
        gather(
            lane.channel, Kind.DISPATCH_AGAIN_BACKWARD, grad_rows_RD,
            routing.row_of_copy, None, routing.tally,
        )  # fmt: skip
    return grad_rows_RD


def join_dispatch_again_backward(
    lane: Lane, grad_rows_RD: torch.Tensor, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the tokens `(T, D)`, and a token."""
    return _join_sums(lane, Kind.DISPATCH_AGAIN_BACKWARD, grad_rows_RD, routing)


def _launch_copies(
    lane: Lane, kind: Kind, rows_TD: torch.Tensor, routing: Routing, beside: bool
) -> torch.Tensor:
    """Send the copies of a dispatch again, with other contents; return the rows sent."""
    rows_TD = rows_TD.contiguous()
    with lane.launch(kind, rows_TD, *routing, beside=beside):
        scatter(lane.channel, kind, rows_TD, routing.copy_of_peer_TW, routing.copy_of_slot_TK, routing.tally)
    return rows_TD


def _join_sums(
    lane: Lane, kind: Kind, like: torch.Tensor, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum what came back for each token; return `(T, D)`, of the dtype of `like`, and a token."""
    T = routing.copy_of_peer_TW.shape[0]
    sums_TD, token = like.new_empty((T, lane.layout.hidden_dim)), _token(like)
    with lane.join(kind):
        lane.arrive(kind, routing.tally)
        finish(
            lane.channel, kind, sums_TD, token,
            routing.copy_of_peer_TW, routing.copy_of_slot_TK, routing.tally,
        )  # fmt: skip
    return sums_TD, token


def launch_barrier(lane: Lane) -> None:
    """Tell every peer that this rank is here."""
    with lane.launch(Kind.BARRIER, kernel_waits=True):
        barrier(lane.channel, None, arrive=True, leave=lane.channel.spins)


def join_barrier(lane: Lane) -> None:
    """Wait until every peer is here."""
    _leave(lane, Kind.BARRIER, None)


def launch_counts(
    lane: Lane, ids_TK: torch.Tensor, table: torch.Tensor | None = None, ledger: torch.Tensor | None = None
) -> torch.Tensor:
    """Tell every peer how many slots go to each place; return int32 `(W, W * L)` for the join to write."""
    layout = lane.layout
    ids_TK = ids_TK.contiguous()
    places_TK = ids_TK if table is None else torch.empty_like(ids_TK, dtype=torch.int32)
    counts_WE = ids_TK.new_empty((layout.world_size, layout.num_experts), dtype=torch.int32)
    tally, sums = counts_WE.new_empty(layout.world_size), new_sums(lane.channel, ids_TK)
    with lane.launch(Kind.COUNTS, ids_TK, places_TK, tally, *sums, kernel_waits=True):
        if table is not None:
            assign(lane.channel, ids_TK, table, places_TK)
        count(lane.channel, places_TK, tally, sums, Kind.COUNTS, ledger)
        barrier(lane.channel, counts_WE, ledger, arrive=True, leave=lane.channel.spins)
    return counts_WE


def join_counts(lane: Lane, counts_WE: torch.Tensor, ledger: torch.Tensor | None = None) -> None:
    """Wait for the counts of every rank; afterwards `counts_WE` holds them."""
    _leave(lane, Kind.COUNTS, counts_WE, ledger)


def _leave(
    lane: Lane, kind: Kind, counts_WE: torch.Tensor | None, ledger: torch.Tensor | None = None
) -> None:
    with lane.join(kind):
        lane.arrive(kind)
        if not lane.channel.spins:
            barrier(lane.channel, counts_WE, ledger, arrive=False, leave=True)
