"""Pictures of measurements: lines over a labelled axis, drawn by matplotlib where that is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.bench.report import check_file
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (".png", ".svg")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Told apart with every common kind of colour vision: Okabe and Ito, "Color Universal Design", 2008."""
MARKERS = "osD^vPX"
_DASHES = ("--", "-.", ":")
"""Of the first, second and third limit of one line."""
_PANEL_INCHES = 4.6, 3.8
_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a picture."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    limit: bool = False
    """Drawn dashed, without marks, in the colour of the last line that is no limit: what that line cannot pass."""
    colour: str = ""
    """Its own, where it is a limit of all lines."""
    panel: str = ""
    """Title of the part of the picture that it belongs to; parts are in the order in which their first lines come."""


def check_plot(path: Path) -> None:
    """Raise ``ConfigError`` where `line_plot` could not draw into ``path``: before anything is measured for it."""
    if path.suffix not in KINDS:
        raise ConfigError(f"--plot {path}: the name has to end in {' or '.join(KINDS)}")
    check_file("--plot", path)
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; run: pip install 'kvtier[plot]'") from error


def line_plot(
    series: Sequence[Series],
    path: Path,
    *,
    x_label: str,
    y_label: str,
    title: str = "",
    log_x: bool = False,
    x_ticks: Callable[[float], str] | None = None,
) -> None:
    """Draw ``series`` into ``path`` (.png or .svg), a panel beside the other. Labels name the unit.

    ``x_ticks``: the text below a place on the x axis; ticks are then at the places that the lines have. The same series
    make the same bytes. Raises as `check_plot` does, and ``ConfigError`` where the file cannot be written.
    """
    check_plot(path)
    from matplotlib import rc_context  # noqa: PLC0415 - as above
    from matplotlib.figure import Figure  # noqa: PLC0415

    names = list(dict.fromkeys(each.panel for each in series))
    columns = max(1, min(_COLUMNS, len(names)))
    rows = max(1, -(-len(names) // columns))
    with rc_context({"svg.hashsalt": "kvtier", "svg.fonttype": "none"}):
        figure = Figure(figsize=(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows), layout="constrained")
        figure.suptitle(title)
        for number, name in enumerate(names, 1):
            axes = figure.add_subplot(rows, columns, number)
            axes.set(title=name, xlabel=x_label, ylabel=y_label, xscale="log" if log_x else "linear")
            _draw(axes, [each for each in series if each.panel == name], x_ticks)
        try:
            figure.savefig(path, dpi=144, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
        except OSError as failed:
            raise ConfigError(f"--plot {path}: {failed.strerror}") from None


def _draw(axes: Axes, series: Sequence[Series], x_ticks: Callable[[float], str] | None) -> None:
    drawn, limits = -1, 0
    for each in series:
        drawn, limits = (drawn, limits + 1) if each.limit else (drawn + 1, 0)
        at = max(drawn, 0) % len(COLOURS)
        look = (
            {"linestyle": _DASHES[(limits - 1) % len(_DASHES)]}
            if each.limit
            else {"marker": MARKERS[(at + drawn // len(COLOURS)) % len(MARKERS)], "markersize": 5.0}
        )
        axes.plot(each.xs, each.ys, color=each.colour or COLOURS[at], label=each.label, **look)
    if x_ticks is not None:
        places = sorted({x for each in series for x in each.xs})
        axes.set_xticks(places, [x_ticks(place) for place in places])
        axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
