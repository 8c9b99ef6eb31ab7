"""``kvtier generate``: continue one prompt and say where its tokens came from."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from kvtier.cli.log import start_logging
from kvtier.config import add_arguments as add_settings
from kvtier.config import resolve
from kvtier.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from kvtier.engine.engine import Engine
    from kvtier.engine.request import Request, RequestStats
    from kvtier.engine.tokenizer import Tokenizer

IDLE_SECONDS = 0.002
"""Between steps that can do nothing, because blocks are on their way."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; without one it is read from standard input")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text itself, without the model's chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message before the prompt")
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens to generate at most (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="share of probability to draw from (default: 1)")
    parser.add_argument("--n", type=int, default=1, help="continuations of the one prompt (default: 1)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    add_settings(parser, "engine", "store")


def run(args: argparse.Namespace) -> int:
    settings = resolve(vars(args)).settings

    from kvtier.assembly.assemble import assemble
    from kvtier.engine.request import Request
    from kvtier.engine.sampler import SamplingParams

    start_logging(settings.log_level)
    sampling = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        n=args.n,
    )
    if args.prompt is None and sys.stdin.isatty():
        print("type the prompt and end it with Ctrl-D", file=sys.stderr)
    text = args.prompt if args.prompt is not None else sys.stdin.read()
    if not text.strip():
        raise ConfigError("generate: the prompt is empty; give it as an argument or on standard input")
    assembly = assemble(settings)
    try:
        ids = _encoded(assembly.engine.tokenizer, text, args)
        _serve(assembly.engine, Request("generate", tuple(ids), sampling))
    finally:
        assembly.close()
    return 0


def _encoded(tokenizer: Tokenizer | None, text: str, args: argparse.Namespace) -> list[int]:
    if tokenizer is None:
        raise RequestError("this model has no tokenizer, so it can only be served token ids (kvtier serve)")
    if args.raw:
        return tokenizer.encode(text)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    chat = tokenizer.apply_chat_template([*messages, {"role": "user", "content": text}])
    return tokenizer.encode(chat, add_special=False)


def _serve(engine: Engine, request: Request) -> None:
    """Print one continuation as it comes; several of them one after another, once all have ended."""
    stats = engine.add_request(request)
    texts = [""] * request.sampling.n
    last = False
    while not last:
        for output in engine.step():
            texts[output.index] += output.text
            last = output.last
            if request.sampling.n == 1:
                print(output.text, end="", flush=True)
        if not engine.progressed and not last:
            time.sleep(IDLE_SECONDS)
    if request.sampling.n == 1:
        print()
    else:
        for index, text in enumerate(texts):
            print(f"--- {index}\n{text}")
    print(_summary(stats), file=sys.stderr)
    if engine.pace is not None:
        print(engine.pace.sentence(), file=sys.stderr)


def _summary(stats: RequestStats) -> str:
    assert stats.finished is not None, "the request has ended"
    line = (
        f"{stats.prompt_tokens} prompt tokens ({stats.hbm_tokens} from HBM, {stats.external_tokens} loaded, "
        f"{stats.computed_tokens} computed), {stats.completion_tokens} generated"
    )
    if stats.first_token is None or stats.ttft is None:
        return line
    rest = stats.finished - stats.first_token
    rate = f", then {(stats.completion_tokens - 1) / rest:.1f} tokens/s" if rest > 0 else ""
    return f"{line}; first after {stats.ttft:.2f} s{rate}"
