"""``kvtier doctor``: does what the tiers' indexes say agree with what is there, and can it be mended."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvtier.abc.audit import Progress
from kvtier.cli.ask import add_server_arguments, asked
from kvtier.cli.main import FAULT
from kvtier.config import add_arguments as add_settings
from kvtier.config import resolve
from kvtier.errors import ConfigError
from kvtier.registry import plan_tier
from kvtier.store.audit import Audited, audit_tier
from kvtier.store.open import check_tier

CLEAN, FOUND = 0, 1
UNFINISHED = "the audit did not come to its end"
SHOWN_EVERY = 0.1
"""Seconds between two looks at the progress bar."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit code 0: clean. 1: something was found, and with --fix repaired where that is ours to do. 2: could not run. "
        "NVMe directories are opened exclusively; where a server has one, --base-url or --uds asks that server. Files that are "
        "not kvtier's are moved beside the directory, never deleted; on a Redis and in a shared folder they are only reported. "
        "Sealed blocks are proven where the tier's URL has ?encrypt=KEYFILE; with another key file none is deleted."
    )
    parser.add_argument("--fix", action="store_true", help="repair: free or adopt slots, delete bad rows and values")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--most",
        type=int,
        default=1_000_000,
        metavar="N",
        help="names of a Redis, or files of a shared folder, to look at (default: %(default)s)",
    )
    add_server_arguments(parser)
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    if args.server_url is not None or args.server_uds is not None:
        if args.fix:
            raise ConfigError("--fix mends tiers at rest: stop the server and leave --base-url and --uds out")
        return _asked(args)
    plans = [plan_tier(url) for url in resolve(vars(args)).settings.tiers]
    for plan in plans:
        check_tier(plan)
    audits = []
    for plan in plans:
        with _shown_progress(str(plan.url).partition("?")[0]) as progress:
            audits.append(audit_tier(plan, progress, fix=args.fix, most=args.most))
    lasting = [audited for audited in audits if audited is not None]
    if not lasting:
        raise ConfigError(
            "no tier that outlives its process is configured; name one with --tier nvme:///..., fs:///... or redis://..."
        )
    if args.json:
        print(json.dumps({"tiers": [_plain(audited) for audited in lasting]}, indent=2))
    else:
        for audited in lasting:
            _tell(audited, fix=args.fix)
    if any(audited.error is not None for audited in lasting):
        return FAULT
    return FOUND if any(audited.found for audited in lasting) else CLEAN


def _plain(audited: Audited) -> dict[str, object]:
    return {
        "tier": audited.tier,
        "looked_at": audited.looked_at,
        "error": audited.error,
        "notes": audited.notes,
        "findings": [
            {
                "kind": each.finding.kind.value,
                "place": each.finding.place,
                "detail": each.finding.detail,
                "repaired": each.repaired,
                "why_not": each.why_not,
            }
            for each in audited.found
        ],
    }


def _tell(audited: Audited, *, fix: bool) -> None:
    count = len(audited.found)
    if audited.error is not None:
        print(f"kvtier: error: {audited.error}", file=sys.stderr)
        if not audited.looked_at and not count:
            return
    print(f"{audited.tier}: {audited.looked_at:,} places looked at, {count or 'no'} fault{'s' * (count != 1)}")
    for each in audited.found:
        print(f"  {each.finding}")
        if fix:
            outcome = f"repaired: {each.repaired}" if each.repaired else f"left as it is: {each.why_not or UNFINISHED}"
            print(f"    {outcome}")
    for note in audited.notes:
        print(f"  {note}")


@contextmanager
def _shown_progress(what: str) -> Iterator[Progress]:
    """A bar on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _done, _of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task, due = bar.add_task(what, total=None), 0.0

        def show(done: int, of: int) -> None:
            nonlocal due
            if time.monotonic() >= due or done == of:
                bar.update(task, completed=done, total=max(done, of))
                due = time.monotonic() + SHOWN_EVERY

        yield show


def _asked(args: argparse.Namespace) -> int:
    """What a running server says of its own memory."""
    where = args.server_uds or args.server_url
    found = asked(args, "/admin/audit", {}, "findings", "audit")["findings"]
    if not isinstance(found, list):
        raise ConfigError(f"{where}: its findings are no list")
    if args.json:
        print(json.dumps({"server": where, "findings": found}, indent=2))
    else:
        print(f"{where}: {len(found) or 'no'} fault{'s' * (len(found) != 1)} in memory")
        for each in found:
            print(f"  {each}")
    return FOUND if found else CLEAN
