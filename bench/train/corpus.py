"""The text to learn: the help texts that every CPython carries, and batches of it."""

from __future__ import annotations

import torch
from torch import Tensor


def load_corpus() -> Tensor:
    """Return uint8 `(N,)`, the text of `help("topics")` in one piece, some 450 kB of English.

    Raises:
        RuntimeError: this Python was installed without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError(
            "expected the help texts of CPython's standard library, pydoc_data.topics, and this Python has "
            "none; use one that has all of its standard library (Debian: apt-get install libpython3-stdlib)"
        ) from error
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def draw_windows(corpus_N: Tensor, seed: int, step: int, num_windows: int, context: int) -> Tensor:
    """Return int64 `(num_windows, context + 1)`, pieces of text from random places.

    They depend on the arguments alone: every rank draws the same and takes its share.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(corpus_N) - context, (num_windows, 1), generator=generator)
    return corpus_N[starts + torch.arange(context + 1)].long()


def entropy(corpus_N: Tensor, order: int) -> float:
    """Return the entropy of a byte given the `order - 1` bytes before it, in nats.

    Order 1 is the loss of a model that knows how frequent each byte is and nothing else, order 2 of one
    that knows how often each byte follows each other one.

    Example:
        >>> entropy(torch.tensor([7, 8, 7, 8, 7], dtype=torch.uint8), 2) == 0.0
        True
    """
    windows = corpus_N.long().unfold(0, order, 1)
    place = 256 ** torch.arange(order)
    _, whole, count = (windows * place).sum(1).unique(return_inverse=True, return_counts=True)
    if order == 1:
        given = torch.tensor(len(windows)).expand(len(windows))
    else:
        _, history, history_count = (
            (windows[:, :-1] * place[:-1]).sum(1).unique(return_inverse=True, return_counts=True)
        )
        given = history_count[history]
    return (given.double().log() - count[whole].double().log()).mean().item()
