"""XTuner's six stages over a dispatcher of this library: what its decoder layers call.

An exchange is launched in one stage and joined in a later one, so that whatever a decoder layer runs between
them overlaps, and in the backward too. XTuner is not imported: the stages are matched by name and keyword.

| stage | with `async_op=True` | without |
|---|---|---|
| `dispatch_preprocess` | launches, if it is given the weights | nothing |
| `dispatch` | launches, if that has not happened | the whole dispatch |
| `dispatch_postprocess` | joins | nothing |
| `combine_preprocess` | nothing | nothing |
| `combine` | launches | the whole combine |
| `combine_postprocess` | joins | nothing |

A decoder layer of several micro-batches runs the first stage for all of them, then `dispatch` to
`combine_preprocess` for one after the other. Only what is launched in the first stage is in flight under the
other micro-batches' experts: a later launch would come behind them on the caller's stream.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from symm_a2a.dispatcher import SymmTokenDispatcher
from symm_a2a.errors import ConfigError, InputError, LaneBusyError

Stage = dict[str, Any]


class XTunerDispatcher:
    """A dispatcher in six stages, all keyword-only, each taking what the stages before it returned.

    A stage returns a dict with the keys that XTuner reads: `hidden_states`, and `topk_ids`, `topk_weights`,
    `tokens_per_expert` where they are known; others are this class's own.

    Args:
        dispatcher: moves the rows; whoever made it closes it. As many micro-batches may be in flight as it
            has lanes: `EPConfig(num_lanes=)` is to be the decoder layer's micro-batches.

    Raises:
        ConfigError: another dispatcher.
    """

    def __init__(self, dispatcher: SymmTokenDispatcher) -> None:
        if not isinstance(dispatcher, SymmTokenDispatcher):
            raise ConfigError(f"expected a SymmTokenDispatcher, got {type(dispatcher).__name__}")
        self.dispatcher = dispatcher
        self._lanes = itertools.cycle(range(dispatcher.num_lanes))

    def prepare_layer_inputs(self, layer_inputs: list[Tensor]) -> tuple[list[Tensor], list[object | None]]:
        """Return a layer's inputs as they are, and no state for them."""
        return layer_inputs, [None] * len(layer_inputs)

    def prepare_microbatch_input(self, hidden_states: Tensor, layer_state: object | None) -> Tensor:
        """Return a micro-batch's input as it is."""
        del layer_state
        return hidden_states

    def dispatch_preprocess(
        self,
        *,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor | None = None,
        layer_state: object | None = None,
        async_op: bool = False,
    ) -> Stage:
        """Take the tokens of a micro-batch; with `async_op` and the weights, launch their dispatch.

        Args:
            hidden_states: `(T, D)` of the config's dtype.
            topk_ids: `(T, K)`, int32 or int64; -1 masks a slot.
            topk_weights: `(T, K)`, floating; older decoder layers give them to `dispatch` alone.
            layer_state: not used.
            async_op: launch now, join in `dispatch_postprocess`.

        Raises:
            LaneBusyError: as many micro-batches are in flight as there are lanes.
        """
        del layer_state
        stage: Stage = {"hidden_states": hidden_states, "topk_ids": topk_ids, "pending": None}
        if async_op and topk_weights is not None:
            stage["pending"] = self._launch(hidden_states, topk_weights, topk_ids)
        return stage

    def dispatch(
        self, *, pre_dispatched: Stage, topk_weights: Tensor, async_op: bool = False, decoding: bool = False
    ) -> Stage:
        """Run the dispatch, or with `async_op` launch it, unless `dispatch_preprocess` has."""
        del decoding
        x_TD, ids_TK = pre_dispatched["hidden_states"], pre_dispatched["topk_ids"]
        stage: Stage = {"hidden_states": x_TD, "topk_weights": topk_weights, "done": None, "pending": None}
        if async_op:
            stage["pending"] = pre_dispatched["pending"] or self._launch(x_TD, topk_weights, ids_TK)
        elif pre_dispatched["pending"] is not None:
            raise InputError("expected async_op=True in dispatch, as in dispatch_preprocess, got False")
        else:
            stage["done"] = self.dispatcher.dispatch(x_TD, topk_weights, ids_TK)
            stage["hidden_states"] = stage["done"][0]
        return stage

    def dispatch_postprocess(
        self, *, pre_dispatched: Stage, dispatched: Stage, async_op: bool = False, decoding: bool = False
    ) -> Stage:
        """Return the rows `(R, D)` and `tokens_per_expert`, int32 `(L,)`; with `async_op` join first."""
        del pre_dispatched, decoding
        rows_RD, tokens_per_expert_L, handle = self._result(dispatched, async_op, "dispatch")
        return {"hidden_states": rows_RD, "tokens_per_expert": tokens_per_expert_L, "handle": handle}

    def combine_preprocess(
        self,
        *,
        hidden_states: Tensor,
        pre_dispatched: Stage,
        dispatched: Stage,
        post_dispatched: Stage,
        async_op: bool = False,
        decoding: bool = False,
    ) -> Stage:
        """Take the experts' rows, `(R, D)`."""
        del pre_dispatched, dispatched, post_dispatched, async_op, decoding
        return {"hidden_states": hidden_states}

    def combine(
        self,
        *,
        pre_dispatched: Stage,
        dispatched: Stage,
        post_dispatched: Stage,
        pre_combined: Stage,
        async_op: bool = False,
        decoding: bool = False,
    ) -> Stage:
        """Run the combine, or with `async_op` launch it."""
        del pre_dispatched, dispatched, decoding
        y_RD, handle = pre_combined["hidden_states"], post_dispatched["handle"]
        if async_op:
            pending = self.dispatcher.combine_async(y_RD, handle)
            return {"hidden_states": y_RD, "done": None, "pending": pending}
        out_TD = self.dispatcher.combine(y_RD, handle)
        return {"hidden_states": out_TD, "done": out_TD, "pending": None}

    def combine_postprocess(
        self,
        *,
        pre_dispatched: Stage,
        dispatched: Stage,
        post_dispatched: Stage,
        pre_combined: Stage,
        combined: Stage,
        async_op: bool = False,
    ) -> Stage:
        """Return the tokens' weighted sums `(T, D)`; with `async_op` join first."""
        del pre_dispatched, dispatched, post_dispatched, pre_combined
        return {"hidden_states": self._result(combined, async_op, "combine")}

    def _launch(self, x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor) -> Any:
        # In turn: a micro-batch's combine runs in the lane of its dispatch, beside the other micro-batches'.
        lane = next(self._lanes)
        if self.dispatcher.arena.lanes[lane].in_flight:
            raise LaneBusyError(
                f"expected at most {self.dispatcher.num_lanes} micro-batches in flight, one a lane, got one "
                "more; raise EPConfig(num_lanes=) to the decoder layer's micro-batches"
            )
        return self.dispatcher.dispatch_async(x_TD, scores_TK, ids_TK, lane=lane)

    def _result(self, stage: Stage, async_op: bool, name: str) -> Any:
        if async_op != (stage["pending"] is not None):
            raise InputError(
                f"expected async_op={stage['pending'] is not None} in {name}_postprocess, as in {name}, "
                f"got {async_op}"
            )
        return stage["pending"].join() if async_op else stage["done"]
