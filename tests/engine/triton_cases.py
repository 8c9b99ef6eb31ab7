"""Run by ``test_triton.py`` in a process of its own, because Triton decides at its import whether it interprets.

``python triton_cases.py compare`` prints, as JSON, by how much the kernel differs from torch's attention per case;
``python triton_cases.py compile`` the size of the machine code per case.
"""

from __future__ import annotations

import itertools
import json
import math
import sys

import torch
import triton

from kvtier.engine import attention
from kvtier.engine import paged_attention_triton as paged
from kvtier.engine.attention import AttentionBackend, Chunk

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEADS = {"mha": (4, 4), "gqa": (6, 2), "gqa wide": (8, 2), "mqa": (5, 1)}
SLOTS = 40

Case = tuple[str, str, int, int]
"""Kind of heads, KV dtype, head dimension, tokens per block."""


def cases() -> list[Case]:
    return [
        *itertools.product(HEADS, ("bf16", "fp32"), (64, 128), (16,)),
        ("gqa", "fp16", 64, 16),
        ("gqa", "bf16", 80, 16),
        ("gqa", "bf16", 64, 48),
        ("mqa", "fp32", 16, 1),
    ]


def steps(block_tokens: int) -> list[list[Chunk]]:
    """Prompts, parts of prompts and single tokens of three sequences, in tables that are shuffled."""
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(3)).tolist()
    first, second, third = order[:16], order[16:28], order[28:]
    most = 12 * block_tokens
    long = min(90, most - 3)
    return [
        [Chunk(range(long), 0, first), Chunk(range(min(7, most)), 0, second)],
        [Chunk([0], long, first), Chunk([0], min(7, most), second)],
        [Chunk(range(2), long + 1, first), Chunk([0], 0, third), Chunk(range(3), min(8, most - 3), second)],
    ]


def attended(
    module: AttentionBackend,
    kv: torch.Tensor,
    chunks: list[Chunk],
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
) -> torch.Tensor:
    step = module.plan(chunks, kv, queries.shape[1])
    module.write(kv, 1, keys, values, step)
    return module.attend(queries, kv, 1, step)


def compare(case: Case) -> dict[str, float]:
    kind, dtype, head_dim, block_tokens = case
    heads, kv_heads = HEADS[kind]
    generator = torch.Generator().manual_seed(7)
    # What was left in the slots must not show: infinities would turn into NaN.
    left = torch.full((SLOTS, 2, 2, block_tokens, kv_heads, head_dim), math.inf, dtype=DTYPES[dtype])
    ours, theirs = left.clone(), left.clone()
    worst, spare = 0.0, 0.0
    for chunks in steps(block_tokens):
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        keys, values = (torch.empty(tokens, kv_heads, head_dim).normal_(generator=generator) for _ in range(2))
        queries = torch.empty(tokens + 2, heads, head_dim).normal_(generator=generator)  # two spare rows
        got, expected = (
            attended(module, kv, chunks, keys, values, queries) for module, kv in ((paged, ours), (attention, theirs))
        )
        worst = max(worst, float((got - expected)[:tokens].abs().nan_to_num(math.inf).max()))
        spare = max(spare, float(got[tokens:].abs().max()))
    written = ours[:, 1].isfinite()
    same = torch.equal(ours[:, 1][written], theirs[:, 1][written])
    return {
        "error": worst,
        "spare": spare,
        "written alike": float(same),
        "other layer": float(ours[:, 0].isfinite().any()),
    }


def company(head_dim: int) -> bool:
    """Whether a row gets the same bits in one long chunk, in two shorter ones, and beside another sequence."""
    generator = torch.Generator().manual_seed(11)
    kv = torch.empty(SLOTS, 1, 2, 16, 2, head_dim).normal_(generator=generator).bfloat16()
    queries = torch.empty(150, 8, head_dim).normal_(generator=generator)
    table, other = list(range(20)), list(range(20, 40))

    def run(*chunks: Chunk, rows: list[int]) -> torch.Tensor:
        return paged.attend(queries[rows], kv, 0, paged.plan(chunks, kv, 8))

    whole = run(Chunk(range(150), 0, table), rows=list(range(150)))
    late = run(Chunk(range(50), 100, table), rows=list(range(100, 150)))
    beside = run(Chunk(range(9), 3, other), Chunk(range(71), 29, table), rows=[*range(9), *range(29, 100)])
    return torch.equal(whole[100:], late) and torch.equal(whole[29:100], beside[9:])


def compiled(case: Case, rows: int, architecture: int) -> int:
    kind, dtype, head_dim, block_tokens = case
    heads, kv_heads = HEADS[kind]
    constants = {
        "BLOCK_TOKENS": block_tokens,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "GROUP_ROWS": triton.next_power_of_2(heads // kv_heads),
        "HEAD_DIM": head_dim,
        "DIMS": triton.next_power_of_2(head_dim),
        "ROWS": rows,
        "WIDTH": paged.WIDTH,
        "WIDEN": False,
    }
    types = {
        "queries": "*fp32",
        "kv": f"*{dtype}",
        "out": "*fp32",
        "tables": "*i32",
        "tiles": "*i32",
        "scale": "fp32",
        "slot_stride": "i32",
        "value_offset": "i32",
        "table_stride": "i32",
        **dict.fromkeys(constants, "constexpr"),
    }
    source = triton.compiler.ASTSource(fn=paged.paged_attention, signature=types, constexprs=constants)
    target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
    made = triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 2})
    return len(made.asm["cubin"])


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        print(json.dumps({**{str(case): compare(case) for case in cases()}, "company": company(64)}))
    else:
        sizes = {
            f"{case} {rows} sm_{architecture}": compiled(case, rows, architecture)
            for case, rows, architecture in (
                (("gqa wide", "bf16", 128, 16), paged.TILE_ROWS, 90),
                (("gqa wide", "bf16", 128, 16), paged.DECODE_ROWS, 90),
                (("gqa", "bf16", 80, 16), paged.TILE_ROWS, 80),
                (("mha", "fp32", 64, 16), paged.DECODE_ROWS, 90),
            )
        }
        print(json.dumps(sizes))
