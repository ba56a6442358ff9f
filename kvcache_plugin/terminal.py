"""What a terminal is shown: tables and progress. rich draws where it is; elsewhere it is text."""

from __future__ import annotations

import contextlib
import shutil
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

#: Columns of a terminal that no table fills.
_WIDE: Final = 100_000
#: Fewer are done before anybody has seen a bar.
_MANY: Final = 8


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, whole: Collection[str] = ()
) -> None:
    """Print a table; on a terminal that is too narrow its cells are broken into lines.

    :param whole: columns whose cells are not broken; where there is one, no word is broken either,
        and a table that is too wide for that is printed as text.
    """
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _print_plain_table(columns, rows)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in whole)
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, emoji=False, highlight=False)
    # Measured for a wide terminal: for a narrow one rich breaks words.
    unlimited = console.options.update(width=_WIDE)
    fits = not whole or console.measure(table, options=unlimited).minimum <= console.width
    if console.is_terminal and fits:
        console.print(table)
    else:
        _print_plain_table(columns, rows)


def print_line(line: str, style: str = "") -> None:
    """One line of any length; in a style of rich's on a terminal."""
    if style and sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            from rich.console import Console

            console = Console(markup=False, emoji=False, highlight=False)
            console.print(line, style=style, soft_wrap=True)
            return
    print(line)


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Shows a line that is written over, on a terminal; elsewhere it shows nothing."""
    if not sys.stderr.isatty():
        yield lambda line: None
        return
    width = shutil.get_terminal_size().columns - 1

    def show(line: str) -> None:
        sys.stderr.write(f"\r{line[:width].ljust(width)}")
        sys.stderr.flush()

    try:
        yield show
    finally:
        show("")
        sys.stderr.write("\r")


@contextlib.contextmanager
def progress_bar(what: str, *, redraws_itself: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Shows how many of many are done, on a terminal; elsewhere, or of few, nothing.

    :param redraws_itself: in between, too, from a thread, which disturbs what is timed.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        with progress_line() as show:
            yield lambda done, total: show(f"{what}: {done} of {total}") if _many(total) else None
        return
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, auto_refresh=redraws_itself)
    task = bar.add_task(what, total=None)

    def advance(done: int, total: int) -> None:
        if _many(total):
            bar.start()
            bar.update(task, completed=done, total=total, refresh=not redraws_itself)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()


def _many(total: int) -> bool:
    return total >= _MANY


def _print_plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())
