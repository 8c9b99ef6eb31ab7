"""What a measurement tells: rows as a table and as JSON, progress meanwhile, and a way to stop in order."""

from __future__ import annotations

import json
import os
import platform
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from kvtier.errors import ConfigError

Row = Mapping[str, object]


STOPPED_BY = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """A person, or who runs this process, has asked it to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextmanager
def stoppable() -> Iterator[Callable[[], None]]:
    """Inside, SIGINT and SIGTERM interrupt nothing: what is yielded raises ``Stopped`` when it is called after one.

    So whatever is open is closed where it was opened, at a place that was chosen. For the main thread.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        came.append(number)

    def proceed() -> None:
        if came:
            raise Stopped(came[0])

    before = {number: signal.signal(number, note) for number in STOPPED_BY}
    try:
        yield proceed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr where that is a terminal; what is yielded says what comes next, ``total`` times."""
    from rich.console import Console  # noqa: PLC0415 - `kvtier --help` needs no rich
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = False

        def step(description: str) -> None:
            nonlocal begun
            bar.update(task, description=description, advance=int(begun))
            begun = True

        yield step


def machine() -> dict[str, object]:
    """What figures of this machine are to be read with."""
    return {"cpu": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}


def percentile(values: Sequence[float], rank: int) -> float | None:
    """By nearest rank, so that it is a value that was seen; None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, -(-rank * len(ordered) // 100) - 1)] if ordered else None


def check_json(path: Path | None) -> None:
    """Raise ``ConfigError`` where a report could not be written, before anything is measured for it."""
    if path is not None:
        check_file("--json", path)


def check_file(flag: str, path: Path) -> None:
    """Raise ``ConfigError`` where ``path``, which ``flag`` names, could not be written; what is there stays as it is."""
    try:
        there = os.path.lexists(path)
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"{flag} {path}: {'a folder' if path.is_dir() else f'{path.parent} is no folder'}")
        if path.is_file() or not path.exists():  # a pipe may have nobody yet who reads
            path.open("ab").close()
            if not there:
                path.unlink()
    except OSError as failed:
        raise ConfigError(f"{flag} {path}: {failed.strerror}") from None


def write_json(path: Path | None, report: Mapping[str, object]) -> None:
    """Raises ``ConfigError`` where it cannot be written."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as failed:
        raise ConfigError(f"--json {path}: {failed.strerror}") from None


def table(rows: Sequence[Row], columns: Mapping[str, Callable[[Row], str]]) -> str:
    """Rows under the columns' names, the first column to the left, the others to the right."""
    lines = [list(columns), *([show(row) for show in columns.values()] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def size(nbytes: float) -> str:
    """``64 KiB``, ``2 MiB``: a power-of-two size as people say it."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes:g} B"
