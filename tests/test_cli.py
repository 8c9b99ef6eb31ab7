"""The ``kvtier`` command as a person meets it."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from kvtier.cli import demo
from kvtier.cli import main as cli
from kvtier.errors import ModelError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from kvtier.cli.showcase import Showcase

SCRIPT = Path(sysconfig.get_path("scripts")) / "kvtier"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("KVTIER_CONFIG", "KVTIER_TIERS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[argparse.Namespace], int]], None]:
    """Registers ``kvtier probe``, which does what the test says."""

    def register(run: Callable[[argparse.Namespace], int]) -> None:
        monkeypatch.setitem(cli.COMMANDS, "probe", "do what the test says")
        module = SimpleNamespace(add_arguments=lambda parser: None, run=run)
        monkeypatch.setitem(sys.modules, "kvtier.cli.probe", module)

    return register


def exit_of(*argv: str) -> int:
    """The exit code, whether argparse leaves or main returns."""
    try:
        return cli.main(argv)
    except SystemExit as leaving:
        return int(leaving.code or 0)


def test_help_lists_every_subcommand_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of("--help") == 0
    shown = capsys.readouterr().out
    for name, summary in cli.COMMANDS.items():
        assert any(line.split() == [name, *summary.split()] for line in shown.splitlines())


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_subcommand_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of(name, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: kvtier {name}")


def test_the_installed_script_says_help_without_loading_torch() -> None:
    code = "import sys; from kvtier.cli.main import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.rstrip().endswith("False")
    version = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert version.stdout.startswith("kvtier ")


def test_config_shows_values_with_their_sources_as_toml(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text('tiers = ["dram://?capacity=4MiB"]\n')
    assert exit_of("config", "--config", str(file), "--hbm-blocks", "77") == 0
    shown = capsys.readouterr().out
    assert tomllib.loads(shown)["engine"]["hbm_blocks"] == 77
    assert tomllib.loads(shown)["tiers"] == ["dram://?capacity=4MiB"]
    lines = {line.split(" ")[0]: line for line in shown.splitlines()}
    assert lines["hbm_blocks"].endswith("# flag --hbm-blocks")
    assert lines["seed"].endswith("# default")
    assert f"]  # file {file}" in " ".join(shown.split("\n")).replace("   ", "")


def test_what_config_prints_is_a_file_with_the_same_settings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert exit_of("config", "--tier", "dram://?capacity=4MiB", "--threads", "3") == 0
    file = tmp_path / "kvtier.toml"
    printed = capsys.readouterr().out
    file.write_text(printed)
    assert exit_of("config", "--config", str(file)) == 0
    assert tomllib.loads(capsys.readouterr().out) == tomllib.loads(printed)


def test_config_masks_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of("config", "--tier", "dram://?capacity=64MiB", "--tier", "redis://user:hunter2@localhost:6379/0") == 0
    assert "redis://user:***@localhost:6379/0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "kvtier: error: the following arguments are required: SUBCOMMAND"),
        (("confg",), "kvtier: error: argument SUBCOMMAND: invalid choice: 'confg'"),
        (
            ("config", "--hbm-bloks=3"),
            "kvtier config: error: unknown argument '--hbm-bloks'; did you mean '--hbm-blocks'?",
        ),
        (("config", "--hbm", "3"), "kvtier config: error: unknown argument '--hbm'"),
        (("config", "more"), "kvtier config: error: unknown argument 'more'"),
        (("config", "--hbm-blocks", "x"), "kvtier: error: flag --hbm-blocks: hbm_blocks: 'x' is not a whole number"),
        (("config", "--tier", "s3://b"), "kvtier: error: unknown tier scheme 's3'; installed: dram, "),
        (("config", "--tier", "nmve:///x"), "kvtier: error: unknown tier scheme 'nmve'; did you mean 'nvme'?"),
        (("config", "--deadline", "-2s"), "expected one argument; one that begins with '-' is given behind a '='"),
        (("config", "--tier", "dram://?capactiy=1"), "did you mean 'capacity'?"),
        (("config", "--tier", "redis://:hunter2"), "kvtier: error: flag --tier: tiers: redis://...: "),
        (("demo", "--tier", "dram://"), "kvtier: error: flag --tier: the demo sets up tiers of its own; leave it out"),
        (("serve", "--port", "99999"), "kvtier: error: flag --port: port: 99999 is more than 65535"),
        (("stress", "--json", "/nowhere/file"), "kvtier: error: flag --json: cannot write the file /nowhere/file"),
        (("demo", "--json", "/nowhere/file"), "kvtier: error: flag --json: cannot write the file /nowhere/file"),
        (
            ("config", "--config", "/nowhere"),
            "kvtier: error: /nowhere: cannot read the settings: No such file or directory",
        ),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_of(*argv) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert "hunter2" not in shown.err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--host", "192.0.2.1", "--port", "0"], "192.0.2.1:0: Cannot assign requested address"),
    ],
)
def test_an_address_that_cannot_be_had_is_said_once(flags: list[str], reason: str) -> None:
    done = subprocess.run([SCRIPT, "serve", *flags], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"kvtier: error: cannot listen on {reason}"
    assert "Traceback" not in done.stderr


def test_the_demos_table_is_whole_at_80_columns() -> None:
    from rich.console import Console  # noqa: PLC0415 - not every install has it

    row = demo.Row("cold", 19.2, 1579, 0, 1579, 0, None, None, logits_equal=True, tokens_equal=True)
    served = replace(
        row, tier="nvme", loaded_tokens=1568, computed_tokens=11, load_bytes=36126720, load_gb_s=12.5, io="buffered"
    )
    out = io.StringIO()
    shown = SimpleNamespace(
        model="SmolLM2-135M-Instruct", exact=True, machine=lambda: "x86_64, 2 compute threads of 2 cores"
    )
    demo._table([row, served, served], served, cast("Showcase", shown), Console(file=out, width=80))
    assert "\u2026" not in out.getvalue()
    assert "19200 ms" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_a_fault_of_the_user_inside_a_command(
    command: Callable[[Callable[[argparse.Namespace], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(args: argparse.Namespace) -> int:
        raise ModelError("no model at ./nowhere")

    command(missing)
    assert exit_of("probe") == 2
    assert capsys.readouterr().err == "kvtier: error: no model at ./nowhere\n"


def test_ctrl_c_is_130_and_quiet(
    command: Callable[[Callable[[argparse.Namespace], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command(interrupted)
    assert exit_of("probe") == 130
    assert capsys.readouterr().err == ""


def test_a_bug_is_not_dressed_up_as_the_users_fault(
    command: Callable[[Callable[[argparse.Namespace], int]], None],
) -> None:
    command(lambda args: int("bug"))
    with pytest.raises(ValueError, match="bug"):
        exit_of("probe")


def test_a_reader_that_has_gone_ends_it_quietly() -> None:
    piped = subprocess.run(
        ["bash", "-c", f"set -o pipefail; '{SCRIPT}' config --tier dram://?capacity=1MiB | true"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert piped.stderr == ""


def test_an_unknown_policy_of_hbm_is_refused_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--hbm-policy=lrru"]) == 2
    assert "hbm_policy: unknown policy 'lrru'; did you mean 'lru'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["config", "doctor"])
@pytest.mark.parametrize(
    ("options", "says"),
    [("codec=lz9", "unknown codec 'lz9'"), ("policy=fifi", "unknown policy 'fifi'"), ("encrypt={key}", "chmod 600")],
)
def test_what_a_url_alone_gives_away_is_refused_before_anything_is_opened(
    command: str, options: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o644)
    folder = tmp_path / "nvme"
    tiers = ("dram://?capacity=16MiB", f"nvme://{folder}?capacity=64MiB&{options.format(key=key)}")
    assert cli.main([command, *(f"--tier={tier}" for tier in tiers)]) == 2
    assert says in capsys.readouterr().err
    assert not folder.exists()
