"""How commands show what they found: aligned columns, sizes and ages for people."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

STATUS = (
    "Exit status: 0 when it is done; 2 when something given is wrong: an option, a name that there "
    "is not, a file that is missing, of another kind or cannot be written; 1 when it could not be "
    "done: Redis is away or full, the time is over, what is stored is damaged."
)
"""What the exit status of every command says, for their --help."""

_UNITS = ("kB", "MB", "GB", "TB")


def figures(named: Mapping[str, object]) -> Iterator[str]:
    """Return a line for each figure: its name, then its value."""
    for name, value in named.items():
        yield f"{name:18} {value:,}" if type(value) is int else f"{name:18} {value!s}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str]) -> list[str]:
    """Return the lines of a table.

    Args:
        head: Names of the columns.
        rows: Their cells.
        left: Columns whose cells begin at the left; others end at the right.
    """
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(head, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


def size(nbytes: int) -> str:
    """Return a number of bytes as people read it, such as "503.3 MB"."""
    if nbytes < 1000:
        return f"{nbytes} B"
    amount, unit = nbytes / 1000, 0
    while amount >= 999.95 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}"


def age(seconds: float) -> str:
    """Return how long ago something was, such as "12 s" or "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"


def percent(part: float, whole: float) -> str:
    """Return a share, such as "1.25%"."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.2f}%" if share >= 0.01 or not share else "<0.01%"


def counted(number: int, noun: str) -> str:
    """Return a number of things, such as "1 tensor" or "2,000 tensors"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
