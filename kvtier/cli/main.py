"""The ``kvtier`` command: a table of subcommands, each of which is imported only when it runs.

A subcommand is a module of this package with ``add_arguments(parser)`` and ``run(args) -> int`` (the exit code), and one
line in ``COMMANDS``. Whatever is the user's to mend (``KvtierError``) ends as one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import NoReturn, Protocol, cast

from kvtier.errors import KvtierError
from kvtier.machine import use_few_heaps
from kvtier.params import nearest

COMMANDS = {
    "demo": "serve a long prompt cold and from each tier, and show what the cache saves",
    "generate": "continue one prompt and say where its tokens came from",
    "serve": "answer the OpenAI API over HTTP, with the configured tiers below",
    "warm": "compute system prompts on a running server, and pin them there",
    "stress": "run an engine over real tiers while everything around it fails, and give one verdict",
    "doctor": "compare what the tiers' indexes say with what is there, and mend it with --fix",
    "clear": "put blocks of a model, tenant, adapter or tier out of reach at once",
    "config": "show the effective settings and where each came from",
    "bench": "measure the tiers and the engine on this machine, or any OpenAI-compatible server",
    "plan": "what a model's KV cache takes on a GPU, and which tiers below are worth having",
    "replay": "one tier's hit rate on a recorded workload, by policy and size, beside the optimum",
    "simulate": "a ladder of tiers on a recorded workload: the store that serves, in virtual time",
}
"""Subcommand -> its line in ``kvtier --help``."""

FAULT, INTERRUPTED = 2, 130


class Command(Protocol):
    """What a subcommand's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the subcommand's arguments; ``kvtier.config.add_arguments`` declares the settings among them."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; returns the exit code."""
        ...


class _Parser(argparse.ArgumentParser):
    """Takes no abbreviations, and answers a wrong flag with the nearest right one."""

    def __init__(self, *, module: str | None = None, **options: object) -> None:
        """``module``: imported for its arguments once this parser is the one that parses."""
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]  # argparse's own options, passed on
        self._module = module

    def parse_known_args(  # type: ignore[override]  # argparse's overloads, of which it calls this one alone
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if self._module is None:
            return super().parse_known_args(args, namespace)
        cast("Command", importlib.import_module(self._module)).add_arguments(self)
        self.shorten_usage()
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return known, unknown

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += "; one that begins with '-' is given behind a '='"
        self.exit(FAULT, f"{self.prog}: error: {message}\n")

    def shorten_usage(self) -> None:
        """Leave the flags to the list below the usage line: there are too many for one line."""
        operands = [action for action in self._actions if not action.option_strings]
        forms = {"?": "[{}]", "*": "[{}]", "+": "{}..."}
        shown = [forms.get(str(each.nargs), "{}").format(each.dest.upper()) for each in operands]
        self.usage = " ".join([self.prog, "[options]", *shown])

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        wrong = unknown[0].partition("=")[0]
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        self.error(f"unknown argument {wrong!r}" + (nearest(wrong, flags) if wrong.startswith("-") else ""))


def add_commands(
    parser: argparse.ArgumentParser, commands: Mapping[str, str], package: str, *, title: str, dest: str
) -> argparse._SubParsersAction[_Parser]:
    """Below ``parser`` a command for each name of ``commands`` (name -> its line in the help), a module of ``package``."""
    below = parser.add_subparsers(title=title, dest=dest, metavar=dest.upper(), required=True, parser_class=_Parser)
    for name, summary in commands.items():
        sentence = summary[0].upper() + summary[1:] + "."
        below.add_parser(name, help=summary, description=sentence, module=f"{package}.{name}")
    return below


def _parse(argv: Sequence[str]) -> tuple[Command, argparse.Namespace]:
    parser = _Parser(
        prog="kvtier",
        description="A four-tier KV-cache store for LLM servers: HBM, DRAM, NVMe and Redis, served by prefix hash.",
        epilog="Every setting is a flag, a KVTIER_... variable and a key of the file that --config names; see `kvtier config`.",
    )
    parser.add_argument("--version", action="version", version=f"kvtier {version('kvtier')}")
    below = add_commands(parser, COMMANDS, "kvtier.cli", title="subcommands", dest="subcommand")
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        below.choices[args.subcommand].refuse(unknown)
    return cast("Command", importlib.import_module(f"kvtier.cli.{args.subcommand}")), args


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``kvtier`` script; returns the exit code."""
    try:
        use_few_heaps()
        command, args = _parse(sys.argv[1:] if argv is None else argv)
        return command.run(args)
    except KvtierError as fault:
        print(f"kvtier: error: {fault}", file=sys.stderr)
        return FAULT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
