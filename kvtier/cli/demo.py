"""``kvtier demo``: one long prompt served cold, then from each tier with the faster ones emptied, and a short chat."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.cli.log import start_logging
from kvtier.config import Settings, TierUrl, redis_url, resolve
from kvtier.config import add_arguments as add_settings
from kvtier.errors import ConfigError, KvtierError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from kvtier.cli.showcase import Showcase

DRAM_CAPACITY = "512MiB"
NVME_CAPACITY = "1GiB"
COLD_RUNS = 3
CHILD_SECONDS = 300.0
QUESTION = "Who developed the Williams tube, and where?"
CHAT = (
    QUESTION,
    "What was magnetic core memory made of?",
    "Why does DRAM have to be refreshed?",
)
LOWER = ("dram", "nvme", "redis")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table, as ``--json`` has it."""

    tier: str
    ttft_s: float
    prompt_tokens: int
    loaded_tokens: int
    """Prompt tokens that were not computed, HBM's included."""
    computed_tokens: int
    load_bytes: int
    load_gb_s: float | None
    """From first read to last scatter."""
    io: str | None
    logits_equal: bool
    tokens_equal: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON to FILE")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="where the NVMe tier lives (default: a temporary one)"
    )
    parser.add_argument("--redis-row", type=Path, help=argparse.SUPPRESS)
    add_settings(parser, "engine")


def run(args: argparse.Namespace) -> int:
    if "tiers" in args:
        raise ConfigError("flag --tier: the demo sets up tiers of its own; leave it out")
    if args.json is not None and (args.json.is_dir() or not os.access(args.json.absolute().parent, os.W_OK)):
        raise ConfigError(f"flag --json: cannot write the file {args.json}")
    settings = resolve(vars(args)).settings
    start_logging(settings.log_level)
    if args.redis_row is not None:
        return _redis_process(settings, args.redis_row)

    from rich.console import Console

    # As after Ctrl-C, the server is stopped and the folder removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    console = Console()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-demo-")))
        url = stack.enter_context(_redis(folder, console))
        nvme = args.directory or folder / "nvme"
        tiers = (
            TierUrl.parse(f"dram://?capacity={DRAM_CAPACITY}"),
            TierUrl("nvme", path=str(nvme.absolute()), params={"capacity": NVME_CAPACITY, "write": "through"}),
            url.with_params(write="through"),
        )
        report = _show(replace(settings, tiers=tiers), url, folder, console)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
        console.print(f"written to {args.json}")
    return 0


@contextmanager
def _redis(folder: Path, console: Console) -> Iterator[TierUrl]:
    """The server of ``KVTIER_REDIS_URL``, or one of our own on a Unix socket."""
    given = redis_url()
    if given is not None:
        console.print(f"Redis: {given} (KVTIER_REDIS_URL)")
        yield given
        return
    from kvtier.testing.valkey import start_valkey

    with start_valkey(folder / "valkey") as server:
        console.print("Redis: a Valkey server of our own on a Unix socket")
        yield TierUrl.parse(server.url)


def document() -> str:
    return (resources.files("kvtier.cli") / "demo_document.txt").read_text(encoding="utf-8")


def _show(settings: Settings, url: TierUrl, folder: Path, console: Console) -> dict[str, object]:
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from kvtier.cli.showcase import Showcase

    salt = f"demo {secrets.token_hex(8)}"  # a shared Redis may know the prompt from an earlier demo
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            with _stage(progress, f"loading {settings.engine.model}"):
                showcase = Showcase(settings, document())
            stack.callback(showcase.close)
            with _stage(progress, "warming up on another prompt"):
                showcase.warm_up()
            rows, same_process = _rows(showcase, settings, url, folder, salt, progress)
        _table(rows, same_process, showcase, console)
        _chat(showcase, salt, rows[0], console)
    return {"model": showcase.model, "exact": showcase.exact, "rows": [asdict(row) for row in rows]}


@contextmanager
def _stage(progress: Progress, name: str, total: int = 1) -> Iterator[TaskID]:
    if not progress.console.is_terminal:
        progress.console.print(name)
    task = progress.add_task(name, total=total)
    yield task
    progress.update(task, completed=total)


def _rows(
    showcase: Showcase, settings: Settings, url: TierUrl, folder: Path, salt: str, progress: Progress
) -> tuple[list[Row], Row]:
    from kvtier.cli.showcase import write_reference

    colds = []
    with _stage(progress, f"cold, {COLD_RUNS} times", COLD_RUNS) as task:
        for number in range(COLD_RUNS):
            colds.append(showcase.serve("cold", QUESTION, salt if number == COLD_RUNS - 1 else f"{salt} {number}"))
            progress.advance(task)
    cold = colds[-1]
    cold_row = replace(
        showcase.row(cold, (cold.tokens, cold.logits)), ttft_s=statistics.median(served.ttft for served in colds)
    )
    rows = [cold_row]
    reference = (cold.tokens, cold.logits)
    for tier in ("hbm", *LOWER):
        with _stage(progress, f"from {tier}"):
            showcase.empty_above(tier)
            rows.append(showcase.row(showcase.serve(tier, QUESTION, salt), reference))
    same_process = rows.pop()
    with _stage(progress, "from redis, in a new process"):
        rows.append(_in_new_process(settings, url, folder, salt, write_reference(cold, folder)))
    return rows, same_process


def _in_new_process(settings: Settings, url: TierUrl, folder: Path, salt: str, reference: Path) -> Row:
    task = folder / "task.json"
    engine = {key: value.value if hasattr(value, "value") else value for key, value in asdict(settings.engine).items()}
    task.write_text(json.dumps({"salt": salt, "reference": str(reference), "row": str(folder / "row.json")}))
    flags = [_flag(name, value) for name, value in engine.items() if value is not None]
    command = [sys.executable, "-m", "kvtier", "demo", "--redis-row", str(task), *flags]
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and our own flags
            command,
            env={**os.environ, "KVTIER_REDIS_URL": url.reveal()},
            capture_output=True,
            text=True,
            timeout=CHILD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DemoFailure(f"the new process did not serve from Redis within {CHILD_SECONDS:.0f} s") from error
    if done.returncode:
        raise ConfigError(f"the new process could not serve from Redis: {done.stderr.strip() or done.returncode}")
    return Row(**json.loads((folder / "row.json").read_text()))


def _flag(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"


def _redis_process(settings: Settings, task_file: Path) -> int:
    """The new process: nothing in its HBM and DRAM, no NVMe, and the prompt's blocks in Redis."""
    from kvtier.cli.showcase import Showcase, read_reference

    task = json.loads(task_file.read_text())
    url = redis_url()
    assert url is not None, "the parent process names its Redis"
    tiers = (TierUrl.parse(f"dram://?capacity={DRAM_CAPACITY}"), url.with_params(write="through"))
    showcase = Showcase(replace(settings, tiers=tiers), document())
    try:
        showcase.warm_up()
        row = showcase.row(showcase.serve("redis", QUESTION, task["salt"]), read_reference(Path(task["reference"])))
    finally:
        showcase.close()
    Path(task["row"]).write_text(json.dumps(asdict(row)))
    return 0


def _table(rows: list[Row], same_process: Row, showcase: Showcase, console: Console) -> None:
    from rich import box
    from rich.table import Table

    cold = rows[0]
    table = Table(
        title=f"{showcase.model}: one prompt of {cold.prompt_tokens} tokens\n{showcase.machine()}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in ("tier", "TTFT", "speed-up", "loaded /\ncomputed", "MB", "GB/s", "I/O", "same\nlogits"):
        table.add_column(name, justify="left" if name == "tier" else "right", no_wrap=True)
    named = [(row.tier, row) for row in rows[:-1]]
    named += [("redis, new", rows[-1]), ("redis, same", same_process)]
    for name, row in named:
        table.add_row(
            name,
            f"{1e3 * row.ttft_s:.0f} ms",
            "" if row.tier == "cold" else f"{cold.ttft_s / row.ttft_s:.1f}x",
            f"{row.loaded_tokens} / {row.computed_tokens}",
            f"{row.load_bytes / 1e6:.1f}" if row.load_bytes else "",
            "" if row.load_gb_s is None else f"{row.load_gb_s:.2f}",
            row.io or "",
            "yes" if row.logits_equal else "no",
        )
    console.print(table)
    console.print(
        "Tokens of the prompt, loaded and computed; GB/s from first read to last scatter. Every row was served with the "
        f"faster tiers really emptied. cold: median TTFT of {COLD_RUNS}; redis, new: by a new process; redis, same: by "
        "this one.",
        highlight=False,
    )
    if not showcase.exact:
        console.print("On this machine prefix hits are not bit-equal to cold runs (exact: false).")


def _chat(showcase: Showcase, salt: str, cold: Row, console: Console) -> None:
    """A few turns about the document: each sends the whole conversation again, and computes only what is new."""
    console.print("\n[bold]A chat about the document[/bold] (for speed; a small model is often wrong)")
    speed = cold.prompt_tokens / cold.ttft_s
    saved = 0.0
    for question, served in showcase.chat(CHAT, f"{salt} chat"):
        saved += served.loaded / speed
        console.print(f"[cyan]> {question}[/cyan]\n{served.text.strip()}", highlight=False)
        instead = f" instead of about {1e3 * served.prompt / speed:.0f} ms" if served.loaded else ""
        console.print(
            f"  [dim]{served.prompt} prompt tokens, {served.loaded} from the cache; "
            f"first token after {1e3 * served.ttft:.0f} ms{instead}[/dim]"
        )
    console.print(f"The cache saved about {saved:.1f} s of computing in {len(CHAT)} turns.")


class DemoFailure(KvtierError):
    """A row's proof did not hold: a tier read what it should not have, or did not read what it should."""
