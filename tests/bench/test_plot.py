"""Pictures say what they show, and whoever cannot draw one is told before anything is measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.bench.plot import COLOURS, Series, check_plot, line_plot
from kvtier.errors import ConfigError

SERIES = [
    Series("load", [65536, 2 << 20], [1.0, 2.0], panel="nvme"),
    Series("limit of loads", [65536, 2 << 20], [1.5, 2.5], limit=True, panel="nvme"),
    Series("load", [65536, 2 << 20], [0.5, 0.75], panel="redis"),
]


def draw(path: Path) -> None:
    line_plot(
        SERIES, path, x_label="block (bytes)", y_label="GB/s", title="tiers", log_x=True, x_ticks=lambda x: f"<{x:g}>"
    )


def test_the_picture_has_its_words_and_a_dashed_limit(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for word in ("block (bytes)", "GB/s", "tiers", "nvme", "redis", "limit of loads", "&lt;65536&gt;"):
        assert word in text
    assert text.count("stroke-dasharray: 5.55") == 2  # the line, and its place in the legend
    draw(tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() == text


def test_two_limits_of_one_line_are_told_apart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    both = [*SERIES[:2], Series("infinite", [65536, 2 << 20], [3.0, 3.0], limit=True, panel="nvme")]
    line_plot(both, tmp_path / "a.svg", x_label="x", y_label="y")
    text = (tmp_path / "a.svg").read_text()
    assert text.count("stroke-dasharray: 5.55") == 2
    assert text.count("stroke-dasharray: 9.6") == 2


def test_a_png_is_one(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_name_that_cannot_be_drawn_into_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.pdf: the name has to end in \.png or \.svg"):
        check_plot(tmp_path / "a.pdf")
    with pytest.raises(ConfigError, match="missing is no folder"):
        check_plot(tmp_path / "missing" / "a.svg")


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from pathlib import Path\n"
        "from kvtier.bench.plot import check_plot\n"
        "check_plot(Path('a.svg'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "ConfigError: --plot needs matplotlib; run: pip install 'kvtier[plot]'" in done.stderr


def test_more_lines_than_colours_have_other_marks_and_a_limit_of_all_its_own_colour(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lines = [Series(str(number), [1, 2], [number, 1]) for number in range(len(COLOURS) + 1)]
    limit = Series("limit", [1, 2], [9, 9], limit=True, colour="#123456")
    line_plot([*lines, limit], tmp_path / "a.svg", x_label="x", y_label="y")
    text = (tmp_path / "a.svg").read_text()
    assert "stroke: #123456" in text
    marks = re.findall(rf'<use xlink:href="#(\w+)"[^>]*{COLOURS[0].lower()}', text)
    assert len(set(marks)) == 2, "the first and the eighth line have one colour and two marks"
