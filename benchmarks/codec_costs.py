"""What each codec costs and gains on real KV, and what the lossy ones change in what the model says.

    python benchmarks/codec_costs.py [--json FILE] [--rounds N] [--tokens N] [--model MODEL]

The KV is that of the demo's document, prefilled with SmolLM2 (bf16, blocks of 16 tokens). Per codec: bytes before / bytes
after; GB of blocks per second and thread, in (encode) and out (decode), medians of rounds in which the codecs take turns;
CPU seconds per GB; and as the limit the rate of np.copyto over the same blocks in the same run. Lossless codecs have to give
back every byte. The lossy ones replace the KV of the first half of the document; then the second half is scored
(perplexity, mean KL divergence per token from the untouched run), and from eight places in the document ``GREEDY`` tokens are
decoded greedily: how many are the same, position by position, and the gap between the two best logits where they part.
"""

from __future__ import annotations

import kvtier.engine  # noqa: F401 - says how compute threads wait, before torch is imported

# isort: split

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from kvtier.abc.codec import Codec
from kvtier.assembly.assemble import tokenizer_of
from kvtier.codec.catalogue import codec_named, codec_names, lossy_codec
from kvtier.config import StoreCodec
from kvtier.engine.attention import Chunk
from kvtier.engine.checkpoint import Checkpoint, open_checkpoint
from kvtier.engine.model import LlamaModel, StepBatch
from kvtier.errors import KvtierError
from kvtier.layout import Layout

BLOCK_TOKENS = 16
GREEDY = 32
STARTS = 8
CHUNK = 512


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over rounds, of all blocks together."""

    seconds: float
    cpu: float


class Subject:
    """The model, the document's tokens, and their KV as it was computed."""

    def __init__(self, checkpoint: Checkpoint, most_tokens: int) -> None:
        tokenizer = tokenizer_of(checkpoint)
        if tokenizer is None:
            raise KvtierError(f"{checkpoint.name} has no tokenizer")
        document = resources.files("kvtier.cli").joinpath("demo_document.txt").read_text(encoding="utf-8")
        self.tokens = tokenizer.encode(document)[:most_tokens]
        identity = checkpoint.identity(BLOCK_TOKENS)
        self.layout: Layout = identity.layout
        self.engine_format = identity.engine_format
        self.dtype = identity.kv_dtype
        self._model = LlamaModel(checkpoint.config, checkpoint.tensors())
        self.blocks = len(self.tokens) // BLOCK_TOKENS
        self._spare = -(-GREEDY // BLOCK_TOKENS) + 1
        self._slots = self.blocks + 1 + STARTS * self._spare
        self.kv = self._fresh()
        for start in range(0, len(self.tokens), CHUNK):
            self._forward(self.kv, [self._chunk(start, min(start + CHUNK, len(self.tokens)), "none")])
        self.raws = [memoryview(self.kv[slot].view(torch.uint8).numpy().reshape(-1)) for slot in range(self.blocks)]  # type: ignore[arg-type]  # an array is a buffer

    def _fresh(self) -> torch.Tensor:
        return self._model.allocate_kv(self._slots, BLOCK_TOKENS, self.dtype)

    def _chunk(self, start: int, end: int, logits: str) -> Chunk:
        return Chunk(self.tokens[start:end], start, range(self.blocks + 1), logits)  # type: ignore[arg-type]  # a literal

    def _forward(self, kv: torch.Tensor, chunks: list[Chunk]) -> torch.Tensor:
        return self._model.forward(StepBatch(tuple(chunks)), kv)

    def through(self, codec: Codec | None, blocks: int) -> torch.Tensor:
        """The KV with its first ``blocks`` encoded and decoded."""
        kv = self._fresh()
        kv[: self.blocks] = self.kv[: self.blocks]
        if codec is not None:
            room = memoryview(bytearray(codec.encoded_bytes(len(self.raws[0]))))
            for slot in range(blocks):
                into = memoryview(kv[slot].view(torch.uint8).numpy().reshape(-1))  # type: ignore[arg-type]  # an array is a buffer
                codec.decode(room[: codec.encode(self.raws[slot], room)], into)
        return kv

    def score(self, codec: Codec | None) -> torch.Tensor:
        """Log-probabilities ``[tokens, vocab]`` behind each token of the second half, over the first half through the codec."""
        half = self.blocks // 2
        kv, end = self.through(codec, half), len(self.tokens) - 1
        parts = range(half * BLOCK_TOKENS, end, CHUNK)
        logits = [self._forward(kv, [self._chunk(start, min(start + CHUNK, end), "all")]) for start in parts]
        return torch.log_softmax(torch.cat(logits), dim=-1)

    def greedy(self, codec: Codec | None) -> tuple[list[list[int]], list[list[float]]]:
        """What follows the document's beginnings through the codec, and the gap between the two best logits at each token."""
        kv = self.through(codec, self.blocks)
        starts = [self.blocks * (n + 1) // (STARTS + 1) for n in range(STARTS)]
        first = self.blocks + 1
        tables = [
            [*range(start), *range(first + n * self._spare, first + (n + 1) * self._spare)]
            for n, start in enumerate(starts)
        ]
        tokens = [[self.tokens[start * BLOCK_TOKENS]] for start in starts]
        gaps: list[list[float]] = [[] for _ in starts]
        for step in range(GREEDY):
            chunks = [
                Chunk([said[-1]], start * BLOCK_TOKENS + step, table)
                for said, start, table in zip(tokens, starts, tables, strict=True)
            ]
            best = self._forward(kv, chunks).topk(2, dim=-1)
            for n in range(STARTS):
                tokens[n].append(int(best.indices[n, 0]))
                gaps[n].append(float(best.values[n, 0] - best.values[n, 1]))
        return [said[1:] for said in tokens], gaps


def timed(job: Callable[[], None]) -> tuple[float, float]:
    start, cpu = time.perf_counter(), time.thread_time()
    job()
    return time.perf_counter() - start, time.thread_time() - cpu


def costs(codecs: list[Codec], raws: list[memoryview], rounds: int) -> tuple[dict[str, dict[str, Cost]], list[int]]:
    """Per codec (and ``limit``) and direction what all blocks cost; and the bytes that each codec makes of them."""
    rooms = {c.name: [memoryview(bytearray(c.encoded_bytes(len(raw)))) for raw in raws] for c in codecs}
    used: dict[str, list[int]] = {c.name: [] for c in codecs}
    backs = [memoryview(bytearray(len(raw))) for raw in raws]
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def encode(codec: Codec) -> None:
        used[codec.name] = [codec.encode(raw, room) for raw, room in zip(raws, rooms[codec.name], strict=True)]

    def decode(codec: Codec) -> None:
        for room, count, back in zip(rooms[codec.name], used[codec.name], backs, strict=True):
            codec.decode(room[:count], back)

    def copy() -> None:
        for raw, back in zip(raws, backs, strict=True):
            np.copyto(np.frombuffer(back, np.uint8), np.frombuffer(raw, np.uint8))

    for turn in range(rounds + 1):
        for codec in codecs:
            took = {("in", codec.name): timed(lambda codec=codec: encode(codec))}  # type: ignore[misc]  # bound now
            took["out", codec.name] = timed(lambda codec=codec: decode(codec))  # type: ignore[misc]  # bound now
            if not codec.lossy and backs != raws:
                raise SystemExit(f"{codec.name} gave back other bytes")
            took["copy", "limit"] = timed(copy)
            if turn:  # the first round warms up
                for key, one in took.items():
                    times.setdefault(key, []).append(one)
    found: dict[str, dict[str, Cost]] = {}
    for (way, name), each in times.items():
        found.setdefault(name, {})[way] = Cost(*map(statistics.median, zip(*each, strict=True)))
    return found, [sum(used[codec.name]) for codec in codecs]


def changes(subject: Subject, lossy: list[Codec]) -> tuple[float, dict[str, dict[str, object]]]:
    """The untouched perplexity; and what each lossy codec does to it and to greedy tokens."""
    wanted = torch.tensor(subject.tokens[subject.blocks // 2 * BLOCK_TOKENS + 1 :])[:, None]
    plain = subject.score(None)
    said, gaps = subject.greedy(None)
    loss = -plain.gather(1, wanted).mean()
    found: dict[str, dict[str, object]] = {}
    for codec in lossy:
        scored = subject.score(codec)
        worse = -scored.gather(1, wanted).mean() - loss
        divergence = (plain.exp() * (plain - scored)).sum(dim=-1).mean()
        best = (plain.argmax(dim=-1) == scored.argmax(dim=-1)).float().mean()
        again, _ = subject.greedy(codec)
        parted = [
            next((step for step in range(GREEDY) if a[step] != b[step]), None) for a, b in zip(said, again, strict=True)
        ]
        found[codec.name] = {
            "perplexity_change_percent": round(float(worse.exp() - 1) * 100, 3),
            "kl_per_token": round(float(divergence), 6),
            "best_token_same_percent": round(float(best) * 100, 2),
            "greedy_same": sum(GREEDY if step is None else step for step in parted),
            "greedy_of": GREEDY * STARTS,
            "gaps_where_parted": [round(gaps[n][step], 3) for n, step in enumerate(parted) if step is not None],
        }
    return float(loss.exp()), found


def run(subject: Subject, rounds: int) -> dict[str, object]:
    lossy: list[Codec] = []
    for name in StoreCodec:
        made = lossy_codec(name.value, subject.layout, subject.engine_format)
        lossy += [made] if made is not None else []
    codecs = [*map(codec_named, codec_names()), *lossy]
    spent, sizes = costs(codecs, subject.raws, rounds)
    perplexity, said = changes(subject, lossy)
    total = sum(map(len, subject.raws))
    limit = total / spent["limit"]["copy"].seconds / 1e9
    print(f"limit: np.copyto {limit:.2f} GB/s on one thread; perplexity of the second half {perplexity:.3f}")
    print("codec         ratio   GB/s in   GB/s out   CPU s/GB in   out    perplexity   KL/token    greedy")
    rows: list[dict[str, object]] = []
    for codec, size in zip(codecs, sizes, strict=True):
        way_in, way_out = spent[codec.name]["in"], spent[codec.name]["out"]
        row: dict[str, object] = {
            "codec": codec.name,
            "ratio": round(total / size, 3),
            "gb_s_in": round(total / way_in.seconds / 1e9, 3),
            "gb_s_out": round(total / way_out.seconds / 1e9, 3),
            "cpu_s_per_gb_in": round(way_in.cpu / total * 1e9, 3),
            "cpu_s_per_gb_out": round(way_out.cpu / total * 1e9, 3),
            "limit_gb_s": round(limit, 3),
            **said.get(codec.name, {}),
        }
        rows.append(row)
        change = (
            f"{row['perplexity_change_percent']:+9.2f} %   {row['kl_per_token']:.1e}"
            if codec.lossy
            else "    exact        0    "
        )
        greedy = f"{row['greedy_same']}/{row['greedy_of']}" if codec.lossy else "same"
        print(
            f"{codec.name:12}{row['ratio']:7.2f}{row['gb_s_in']:10.2f}{row['gb_s_out']:11.2f}"
            f"{row['cpu_s_per_gb_in']:14.2f}{row['cpu_s_per_gb_out']:6.2f}  {change}   {greedy}"
        )
        if codec.lossy:
            print(
                f"{'':12}greedy runs part where the two best logits are apart by {row['gaps_where_parted'] or 'nothing'}"
            )
    return {"perplexity": perplexity, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=1 << 20, help="of the document at most; at least 160")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    options = parser.parse_args()
    try:
        subject = Subject(open_checkpoint(options.model), max(160, options.tokens))
    except KvtierError as fault:
        print(f"codecs: error: {fault}", file=sys.stderr)
        return 2
    nbytes = len(subject.raws[0])
    print(
        f"{len(subject.tokens)} tokens, {subject.blocks} blocks of {nbytes >> 10} KiB ({subject.dtype}), "
        f"median of {options.rounds} rounds, {os.cpu_count()} cores"
    )
    found = run(subject, options.rounds)
    if options.json is not None:
        machine = {"cpu": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        report = {"machine": machine, "tokens": len(subject.tokens), "block_bytes": nbytes, **found}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
