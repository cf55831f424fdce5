"""The figures as text for a terminal."""

from __future__ import annotations

from tabulate import tabulate

from bench.a2av.cases import Mode
from bench.a2av.figures import Result


def format_table(results: list[Result], mode: Mode) -> str:
    """Return a line per case and backend; rates are left out where times mean nothing."""
    time = "p50 (p20 to p80), us" if mode == "gpu" else "interpreted *, ms"
    rates = ["logical GB/s", "remote GB/s", "of link"] if mode == "gpu" else []
    placed = _compares_placements(results)
    headers = ["op", "shape", "routing", *(["placement"] if placed else []), "backend", time, *rates]
    headers += ["launches", "syncs", "sent", *(["busiest rank"] if placed else []), "symm. memory"]
    lines = []
    for result in results:
        case, name = result.case, result.backend + (", graph" if result.graph else "")
        where = [case.shape, case.routing]
        if case.bytes_per_peer is not None:
            where = [f"{_size(case.bytes_per_peer)} to each", ""]
        where += [case.placement] if placed else []
        head = [case.op, *(text if text != "none" else "" for text in where), name]
        if result.error is not None:
            lines.append([*head, "WRONG, not timed"])
            continue
        sent = result.value("remote_bytes")
        memory = result.value("symmetric_bytes")
        lines.append(
            [
                *head,
                _latency(result, mode),
                *(_rates(result) if mode == "gpu" else []),
                f"{result.value('launches'):.0f}",
                f"{result.value('host_syncs'):.0f}",
                _size(sent) if sent else "",
                *([_load(result)] if placed else []),
                _size(memory) if memory else "",
            ]
        )
    texts = 5 if placed else 4
    align = ["left"] * texts + ["right"] * (len(headers) - texts)
    return tabulate(lines, headers=headers, disable_numparse=True, colalign=align)


def notes(results: list[Result], mode: Mode) -> str:
    """Return what a reader of the table must know."""
    lines = [
        "Times are those of the slowest rank. launches, syncs (waits of the host) and sent (bytes to other",
        "ranks, in one run) are of the rank with most of each.",
    ]
    if _compares_placements(results):
        lines.append("busiest rank: rows of its experts over the mean of all ranks, which wait for it.")
    if mode == "gpu":
        lines.append(
            "Rates are of the busiest rank: logical ones of all its rows, remote of what crossed a link."
        )
    else:
        lines = [
            "* Triton's interpreter and gloo on this machine's CPUs: interpreted times are no measure of the",
            "  library's speed; they show that the benchmark works. The results were checked.",
            *lines,
        ]
    return "\n".join(lines)


def _latency(result: Result, mode: Mode) -> str:
    p20, p50, p80 = (result.value(f"latency_p{p}") or 0.0 for p in (20, 50, 80))
    if mode == "interpreted":
        return f"{p50 / 1e3:.1f}"
    return f"{p50:.1f} ({p20:.1f} to {p80:.1f})"


def _rates(result: Result) -> list[str]:
    share = result.value("link_share")
    rates = [result.value(f"{name}_bandwidth") for name in ("logical", "remote")]
    return [
        *("" if rate is None else f"{rate:.1f}" for rate in rates),
        "" if share is None else f"{share:.0%}",
    ]


def _compares_placements(results: list[Result]) -> bool:
    return any(result.case.placement != "contiguous" for result in results)


def _load(result: Result) -> str:
    most = result.value("rows_max_over_mean")
    return "" if most is None else f"{most:.2f}x"


def _size(count: float) -> str:
    """Return a number of bytes in a few characters.

    Example:
        >>> _size(512), _size(1024), _size(1_500_000), _size(3 * 2**30)
        ('512 B', '1 KiB', '1.4 MiB', '3 GiB')
    """
    units = ("B", "KiB", "MiB", "GiB")
    power = 0
    while count >= 1024 and power < len(units) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.1f}".removesuffix(".0") + f" {units[power]}"
