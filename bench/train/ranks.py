"""What a rank does: its part of a training, and one training with each dispatcher."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import symm_a2a
from bench.dispatchers import SHARED, DispatcherFactory, Sharing, sharing_of
from bench.progress import Progress
from bench.train.corpus import draw_windows, load_corpus
from bench.train.in_turn import run_in_turn
from bench.train.meter import MeteredDispatcher
from bench.train.model import Model, whole_batch
from bench.train.options import Options

BALANCE = 0.1
"""Weight of the experts' imbalance in what is minimised; without it, half of them are never used."""

WARMUP = 10
"""Steps until the learning rate is at its peak."""


@dataclass(frozen=True)
class RankRecord:
    """What one rank reports of one training; `losses` and `loads` are the same on every rank.

    Attributes:
        losses: the mean loss of each step over the batch of all ranks.
        loads: of each step, the slots that went to each expert, all layers and ranks together.
        sent: rows that this rank's dispatches sent to each rank.
        seconds: of the steps.
        seconds_in_exchanges: of these, in dispatch and combine, forward and backward.
        ids_SMTK: int32, the experts of this rank's tokens, by step and layer, if there is to be a trace.
    """

    losses: list[float]
    loads: list[list[int]]
    sent: list[int]
    seconds: float
    seconds_in_exchanges: float
    ids_SMTK: np.ndarray | None = None


class Trainer:
    """One rank's model, its optimizer, and its share of each batch.

    Args:
        options: sizes and the seed.
        dispatcher: carries the rows of all layers.
        group: of the ranks; None for a process of its own, with all the experts.
        dtype: of everything.
        domino: runs micro-batches of the sequences through the model; None for all of them at once.
        sharing: what the ranks share out; it is the dispatcher's to say.

    Attributes:
        load_E: int64, slots of the last batch by expert, all layers and ranks together.
        ids_NTK: int64, the experts of this rank's tokens in the last batch, by layer.
    """

    def __init__(
        self,
        options: Options,
        dispatcher: Any,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype = torch.float32,
        domino: symm_a2a.Domino | None = None,
        sharing: Sharing = SHARED,
    ) -> None:
        self.options = options
        # Of the ranks that have other tokens than this one; their gradients are added up.
        self.group = group if sharing.tokens else None
        self._run, self._micro_batches = (
            (run_in_turn, 1) if domino is None else (domino.run, domino.num_micro_batches)
        )
        self.rank, self.ranks = (
            (0, 1) if self.group is None else (dist.get_rank(self.group), dist.get_world_size(self.group))
        )
        self.corpus_N = load_corpus()
        self.model = Model(options, dispatcher, group if sharing.experts else None).to(dtype)
        self._replicated = self.model.replicated() if sharing.experts else list(self.model.parameters())
        self._optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        self.load_E = torch.zeros(options.experts, dtype=torch.int64)
        self.ids_NTK = torch.zeros(options.layers, 0, options.top_k, dtype=torch.int64)

    def step(self, number: int) -> float:
        """Train on batch `number`; return its mean loss, over all ranks."""
        for settings in self._optimizer.param_groups:
            settings["lr"] = self.options.learning_rate * self._warmth(number)
        loss = self.backward(number)
        self._optimizer.step()
        return loss

    def backward(self, number: int) -> float:
        """Leave the gradients of the whole batch's mean loss in the parameters; return that loss."""
        self._optimizer.zero_grad()
        micro_batches = self._my_windows(number).chunk(self._micro_batches)
        tokens = [windows[:, 1:].numel() for windows in micro_batches]
        outputs = self._run(self.model, micro_batches)
        batch = whole_batch(outputs, symm_a2a.token_shares(tokens, self.group), self.group)
        self.load_E = batch.load_E
        self.ids_NTK = torch.cat([torch.stack([r.ids_TK for r in routings]) for _, routings in outputs], 1)
        # An expert's gradients come out whole, for the rows that reach it are those of all ranks.
        # Everything else has seen this rank's tokens alone: add up.
        (batch.loss + BALANCE * batch.imbalance).backward()
        return self._add_up(batch.loss.detach())

    def _my_windows(self, number: int) -> torch.Tensor:
        options = self.options
        whole = options.tokens // options.context * options.ranks
        windows = draw_windows(self.corpus_N, options.seed, number, whole, options.context)
        mine = whole // self.ranks
        return windows[self.rank * mine : (self.rank + 1) * mine]

    def _add_up(self, loss: torch.Tensor) -> float:
        """Add up, over the ranks, the replicated parameters' gradients and the loss, in one message."""
        if self.group is None:
            return loss.item()
        grads = [p.grad for p in self._replicated if p.grad is not None]
        message = torch.cat([loss.view(1), *(grad.flatten() for grad in grads)])
        dist.all_reduce(message, group=self.group)
        total, *parts = message.split([1, *(grad.numel() for grad in grads)])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))
        return total.item()

    def _warmth(self, number: int) -> float:
        steps = self.options.steps
        fall = max(0.0, (number + 1) / steps - 0.4) / 0.6
        return min(1.0, (number + 1) / WARMUP) * (1 - 0.9 * fall)


def exchange_config(
    options: Options,
    dtype: torch.dtype = torch.float32,
    micro_batches: int = 1,
    sharing: Sharing = SHARED,
) -> symm_a2a.EPConfig:
    """Return the sizes of the layers' exchanges, with a lane for each micro-batch."""
    return symm_a2a.EPConfig(
        num_experts=options.experts,
        top_k=options.top_k,
        hidden_dim=options.dim,
        max_tokens_per_rank=options.tokens * (1 if sharing.tokens else options.ranks) // micro_batches,
        dtype=dtype,
        num_lanes=micro_batches,
    )


def train_rank(
    rank: int, group: dist.ProcessGroup, options: Options, factories: Mapping[str, DispatcherFactory]
) -> dict[str, RankRecord]:
    """Be one rank: train with each dispatcher of `options.names` and report on each."""
    return {
        name: _train(name, over_link(factories[name], options, name), options, group, show=rank == 0)
        for name in options.names
    }


def over_link(factory: DispatcherFactory, options: Options, name: str = "symm") -> DispatcherFactory:
    """Return the factory, with the link of the options for the dispatcher that can emulate one."""
    link = options.emulated_link
    return factory if link is None or name != "symm" else functools.partial(factory, link=link)


def _train(
    name: str, factory: DispatcherFactory, options: Options, group: dist.ProcessGroup, show: bool
) -> RankRecord:
    rank, sharing = dist.get_rank(group), sharing_of(name)
    with factory(exchange_config(options, sharing=sharing), group, device="cpu") as dispatcher:
        metered = MeteredDispatcher(dispatcher)
        trainer = Trainer(options, metered, group, sharing=sharing)
        losses, loads, ids = [], [], []
        dist.barrier(group)
        begin = time.perf_counter()
        with Progress(name, options.steps, show) as progress:
            for number in range(options.steps):
                losses.append(trainer.step(number))
                loads.append(trainer.load_E.tolist())
                if options.trace:
                    ids_NTK = (
                        trainer.ids_NTK if sharing.tokens else trainer.ids_NTK.chunk(options.ranks, 1)[rank]
                    )
                    ids.append(ids_NTK.numpy().astype(np.int32))
                progress.advance(f"loss {losses[-1]:.3f}")
        seconds = time.perf_counter() - begin
    sent = metered.sent_W.tolist()
    if not sharing.experts:
        # In a group of one, which is this rank.
        sent = [sent[0] if other == rank else 0 for other in range(options.ranks)]
    return RankRecord(
        losses=losses,
        loads=loads,
        sent=sent,
        seconds=seconds,
        seconds_in_exchanges=metered.watch.seconds,
        ids_SMTK=np.stack(ids) if ids else None,
    )
