"""`python -m bench ulysses`: what is wrong is never timed, and the figures are what they say."""

import csv

import pytest

from bench.ulysses import command
from bench.ulysses.backends import BACKENDS, METADATA_BYTES, AllToAll, Symm
from bench.ulysses.options import Options
from symm_a2a import SequenceGroup
from symm_a2a.kernels.ulysses import SequenceLayout

TINY = dict(ranks=2, tokens=(3,), heads=4, dim=5, iterations=2, warmup=1)


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_command_writes_tidy_figures(tmp_path, capsys):
    path = tmp_path / "u.csv"
    assert command.run(Options(**TINY, csv=path)) == 0
    shown = capsys.readouterr().out
    assert "interpreted" in shown
    assert "GB/s" not in shown
    metrics = {}
    for row in rows_of(path):
        assert tuple(row) == command.COLUMNS
        assert row["mode"] == "interpreted"
        metrics.setdefault((row["op"], row["backend"]), {})[row["metric"]] = row["value"]
    assert set(metrics) == {(op, backend) for op in Options.op for backend in BACKENDS}
    half = 1 * 3 * 2 * 5 * 2  # What each of two ranks sends to the other: tokens, its heads, dim, bytes.
    for (op, backend), figures in metrics.items():
        exchanges = 4 if op == "forward-backward" else 1
        extra = METADATA_BYTES if backend == "symm" else 0
        assert float(figures["payload_bytes"]) == 2 * half * exchanges
        assert float(figures["remote_bytes"]) == (half + extra) * exchanges
        assert 0 < float(figures["latency_p20"]) <= float(figures["latency_p80"])
        if backend == "symm":
            assert float(figures["launches"]) == 2 * exchanges
            assert float(figures["symmetric_bytes"]) == SequenceGroup.symmetric_bytes(2 * half, 2)


def test_metadata_is_what_the_layout_holds():
    layout = SequenceLayout(world_size=4, max_bytes=100)
    assert (layout.ready.nbytes + layout.cards.nbytes) // (2 * 4) == METADATA_BYTES


class SwapsHeads(AllToAll):
    """Gives rank 1 its heads in another order."""

    def seq_to_head(self, x):
        out = super().seq_to_head(x)
        return out.flip(2) if self.group.rank() == 1 else out


class LosesGradients(Symm):
    """Right in the forward; one token's gradient does not arrive."""

    def head_to_seq(self, x):
        lost = x.clone()
        lost[:, 0] = x[:, 0].detach()
        return super().head_to_seq(lost)


@pytest.mark.parametrize(
    ("name", "wrong", "op", "text"),
    [
        ("all_to_all", SwapsHeads, "seq-to-head", "rank 1: result: "),
        ("symm", LosesGradients, "forward-backward", "rank 0: gradient: "),
    ],
)
def test_what_is_wrong_is_not_timed(name, wrong, op, text, tmp_path, capsys):
    path = tmp_path / "u.csv"
    options = Options(**TINY, csv=path, op=(op,), backend=(name,))
    assert command.run(options, backends={name: wrong}) == 1
    (row,) = rows_of(path)
    assert (row["metric"], row["value"]) == ("error", "")
    assert text in row["note"]
    assert "WRONG, not timed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(heads=5), "expected --heads to be a multiple of 2 ranks, got 5"),
        (dict(tokens=(0,)), "expected a positive --tokens, got 0"),
        (dict(op=()), "expected at least one --op, got none"),
        (dict(warmup=-1), "expected --warmup of 0 or more, got -1"),
    ],
)
def test_options_that_do_not_fit(changes, text, tmp_path, capsys):
    assert command.run(Options(**(TINY | changes), csv=tmp_path / "u.csv")) == 2
    assert capsys.readouterr().err == f"bench ulysses: {text}\n"
