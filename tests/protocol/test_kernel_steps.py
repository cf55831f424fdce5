"""What kernels do to a lane, read off the kernels themselves, is what docs/protocol.md says."""

from pathlib import Path
from unittest import mock

import pytest
import triton
import triton.language as tl

from symm_a2a.kernels import gather, phases, scatter
from symm_a2a.kernels.channel import Kind
from tests.protocol.steps import kernels, told

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


def shown(key):
    """A kernel's name for a reader, by operation where it serves several."""
    name, *forms = key
    form = dict(text.split("=") for text in forms)
    words = [name.strip("_").removesuffix("_kernel").replace("_", " ")]
    if "KIND" in form and name != "_credit_kernel":
        words.append(Kind(int(form["KIND"])).title)
    if form.get("COUNTS_TOO") == "True":
        words.append("of few tokens")
    return ", ".join(words)


def table():
    """The rows of the page: kernels that differ in nothing share one."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for key, found in kernels("gpu", 2, 1).items():
        every = told(found.programs[-1])
        first = [step for step in told(found.programs[0]) if step not in every]
        cells = ("; ".join(every), "; ".join(first), "; ".join(told(found.last)))
        names = rows.setdefault(cells, [])
        if shown(key) not in names:
            names.append(shown(key))
    return [
        f"| {'; '.join(names)} | {' | '.join(cells)} |".replace("  ", " ") for cells, names in rows.items()
    ]


def test_the_page_has_the_steps_of_all_kernels():
    text = PAGE.read_text().split("<!-- steps -->")[1]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert lines == table()


@pytest.mark.parametrize("rank", [0, 2])
def test_sections_and_flags_are_those_of_the_rules(rank):
    """A rank writes its own section everywhere; it reads all sections, and waits for all flags, at home."""
    everywhere = frozenset((peer, rank) for peer in range(3))
    at_home = frozenset((rank, peer) for peer in range(3))
    for world in ("host", "gpu"):
        for key, found in kernels(world, 3, rank).items():
            for step in (step for part in (*found.programs, found.last) for step in part):
                assert step.places == (everywhere if step.what in ("write", "publish") else at_home), (
                    key,
                    step,
                )


@triton.jit
def _publish_first(
    peers_ptr, ready_ptr, abort_ptr, state_ptr, status_ptr, rank, epoch, detail, copies, polls,
    READY: tl.constexpr, LAUNCHED: tl.constexpr, SPINS: tl.constexpr, KIND: tl.constexpr,
    W: tl.constexpr, W_PAD: tl.constexpr,
):  # fmt: skip
    """An end of a launch that forgets to wait."""
    phases.publish(peers_ptr, READY, rank, phases.flag_words(epoch, KIND, detail, W_PAD), W, W_PAD)
    tl.store(state_ptr + LAUNCHED, epoch)


@triton.jit
def _no_credit(
    free_ptr, state_ptr, status_ptr, epoch, KIND: tl.constexpr, W: tl.constexpr, W_PAD: tl.constexpr
):  # fmt: skip
    """A launch that does not ask whether it may."""
    return phases.healthy(state_ptr)


@pytest.mark.parametrize(
    ("module", "name", "fault", "lost"),
    [
        (scatter, "announce", _publish_first, "wait scatter_ready"),
        (gather, "may_launch", _no_credit, "check gather_free -1"),
    ],
)
def test_a_kernel_that_does_something_else_is_seen(module, name, fault, lost):
    def steps():
        found = kernels.__wrapped__("gpu", 2, 1).values()
        return [step for one in found for part in (*one.programs, one.last) for step in told(part)]

    before = steps().count(lost)
    with mock.patch.object(module, name, fault):
        after = steps().count(lost)
    assert after < before
