"""``kvtier clear``: blocks of a model, tenant, adapter or tier are out of reach at once, and reclaimed behind."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvtier.abc.store import Selection
from kvtier.cli.ask import add_server_arguments, asked
from kvtier.config import add_arguments as add_settings
from kvtier.config import environment_secret, resolve
from kvtier.errors import ConfigError, RequestError
from kvtier.key import Scope
from kvtier.quantity import rounded_bytes
from kvtier.store.open import open_at_rest

DONE, LEFT = 0, 1
RECLAIM_SECONDS = 600.0
ADVICE = "clear through that process: name it with `kvtier clear --base-url URL` or `--uds PATH`, or stop it first"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Without --tier NAME every tier forgets what is selected, and so do all processes that share a Redis or folder: from "
        "their next request to it on, and within a second in any case. Without --base-url and --uds the configured tiers are "
        "opened here, which an NVMe directory that a server holds does not allow. Exit code 0: done. 1: some tier could not "
        "be told. 2: could not run."
    )
    parser.add_argument("--model", dest="clear_model", metavar="NAME", help="only blocks of this model")
    parser.add_argument(
        "--tenant",
        dest="clear_tenant",
        metavar="ID",
        help="only blocks of this tenant: its id (32 hexadecimal digits; zeros: requests without a tenant), or where its "
        "secret stands, as @FILE or env:VARIABLE; the secret never leaves this process",
    )
    parser.add_argument("--adapter", dest="clear_adapter", metavar="NAME", help="only blocks of this adapter")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_server_arguments(parser)
    add_settings(parser)
    (tier,) = [action for action in parser._actions if action.dest == "tiers"]
    tier.metavar = "NAME|URL"
    tier.help = f"NAME (dram, nvme, fs, redis, ...): empty that whole tier instead. URL: {tier.help}"


def run(args: argparse.Namespace) -> int:
    given: list[str] = getattr(args, "tiers", None) or []
    names = [each for each in given if "://" not in each]
    urls = [each for each in given if "://" in each]
    if len(names) > 1:
        raise ConfigError(f"--tier: one tier at a time, got {' and '.join(names)}")
    what = _selection(args)
    tier = names[0] if names else None
    if tier is not None and what != Selection():
        raise ConfigError("--tier NAME empties a whole tier; it cannot be combined with --model, --tenant or --adapter")
    if args.server_url is not None or args.server_uds is not None:
        tenant = None if what.tenant is None else what.tenant.hex()
        body = {"model": what.model, "tenant": tenant, "adapter": what.adapter, "tier": tier}
        cleared = asked(args, "/admin/clear", body, "tiers", "clear")
        finished = False
    else:
        settings = {name: value for name, value in vars(args).items() if name != "tiers"}
        cleared, finished = _at_rest({**settings, "tiers": urls} if urls else settings, what, tier)
    if args.json:
        print(json.dumps({**cleared, "reclaimed": finished}, indent=2))
    else:
        _tell(cleared, what, tier, finished=finished)
    return LEFT if any(each["trouble"] for each in cleared["tiers"].values()) else DONE


def _selection(args: argparse.Namespace) -> Selection:
    try:
        return Selection(args.clear_model, _tenant(args.clear_tenant), args.clear_adapter)
    except ValueError as wrong:
        raise ConfigError(str(wrong)) from None


def _tenant(given: str | None) -> bytes | None:
    """The tenant's id. A file's last line end is not part of the secret in it."""
    if given is None:
        return None
    try:
        if given.startswith("@"):
            secret = Path(given[1:]).read_bytes().removesuffix(b"\n").removesuffix(b"\r")
            return Scope(tenant=secret).tenant_id
        if given.startswith("env:"):
            return Scope(tenant=environment_secret(given[4:])).tenant_id
        if len(given) == 32:
            return bytes.fromhex(given)
    except OSError as failed:
        raise ConfigError(f"--tenant: {given[1:]}: {failed.strerror}") from None
    except ValueError:
        pass
    raise ConfigError(
        "--tenant: give the tenant's id (32 hexadecimal digits), or its secret as @FILE or env:VARIABLE; "
        "a secret on the command line can be read by others"
    )


def _at_rest(settings: dict[str, object], what: Selection, tier: str | None) -> tuple[dict[str, Any], bool]:
    """Open the tiers that last, clear them and reclaim; whether all of it was reclaimed."""
    if tier == "dram":
        raise ConfigError("dram lives in a server's process; name that with --base-url or --uds")
    with closing(open_at_rest(resolve(settings).settings.tiers, ADVICE)) as store:
        lasting = [name for name in store.health() if name != "dram"]
        if not lasting:
            raise ConfigError(
                "no tier that outlives its process is configured; name one with --tier nvme:///..., fs:///... or redis://..., "
                "or a running server with --base-url or --uds"
            )
        try:
            cleared = store.clear(what, tier)
        except RequestError as wrong:
            raise ConfigError(f"--tier: {wrong}") from None
        plain = asdict(cleared)
        plain["tiers"].pop("dram", None)
        return plain, store.reclaim(RECLAIM_SECONDS)


def _tell(cleared: dict[str, Any], what: Selection, tier: str | None, *, finished: bool) -> None:
    if tier is None:
        print(f"cleared {what}: epoch {cleared['epoch']}")
        for scope in cleared["scopes"]:
            adapter = scope["adapter"]["name"] if scope["adapter"] else "none"
            print(f"  model {scope['model']}, tenant {scope['tenant']}, adapter {adapter}")
        if not cleared["scopes"]:
            print("  no record of such a scope is there; what there may be without one is cleared as well")
    else:
        print(f"cleared tier {tier}")
    for name, left in cleared["tiers"].items():
        if left["trouble"]:
            print(f"{name}: NOT TOLD: {left['trouble']}")
        elif left["blocks"] is None:
            print(
                f"{name}: {'reclaimed' if finished else 'reclaims what was cleared, in the background or by its TTL'}"
            )
        else:
            done = "reclaimed" if finished else "to be reclaimed"
            print(f"{name}: {left['blocks']:,} blocks, {rounded_bytes(left['nbytes'])} {done}")
