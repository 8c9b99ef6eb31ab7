"""What ``kvtier stress`` serves: a tiny model, and prompts whose answers rounding cannot change and a wrong byte can."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

from kvtier.assembly.assemble import open_engine
from kvtier.cli.stress_worker import Plan
from kvtier.engine.request import Request
from kvtier.engine.sampler import SamplingParams
from kvtier.errors import ConfigError

HBM_BLOCKS, DRAM_BLOCKS, NVME_BYTES = 32, 96, 6 << 20
"""Few of everything: requests preempt each other, and each tier evicts all the time."""
PROMPTS, NEW_TOKENS, LEAST_GAP = 48, 24, 1e-2
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "hidden_act": "silu",
}
"""So small that a step takes a millisecond; its random weights come from the seed."""
BLOCK_BYTES = 8192


def make_plan(folder: Path, valkey_url: str, seed: int, *, aborts: bool) -> Plan:
    """A tiny model, prompts after which its two best tokens are never close, and what they give without a cache."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    tiers = (
        f"dram://?capacity={DRAM_BLOCKS * BLOCK_BYTES}&verify=always",
        f"nvme://{folder / 'nvme'}?capacity={NVME_BYTES}&write=through",
        valkey_url + ("&" if "?" in valkey_url else "?") + "write=through&ttl=10m&timeout=500ms",
    )
    empty = Plan(str(folder / "model"), tiers, (), (), seed, aborts, HBM_BLOCKS)
    dice = random.Random(seed)  # noqa: S311 - makes prompts, guards nothing
    shared = [dice.randrange(320) for _ in range(64)]
    prompts = [
        tuple(shared[: 32 * dice.randrange(3)] + [dice.randrange(320) for _ in range(dice.randrange(24, 120))])
        for _ in range(4 * PROMPTS)
    ]
    engine = open_engine(empty.engine(prefix_cache=False))
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
    kept: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for number, prompt in enumerate(prompts):
        if len(kept) == PROMPTS:
            break
        engine.add_request(Request(f"p{number}", prompt, sampling))
        tokens: list[int] = []
        gap = float("inf")
        while engine.open_requests:
            for output in engine.step():
                tokens += output.tokens
                if output.logprob is not None:
                    best, second = output.logprob[1][:2]
                    gap = min(gap, best.value - second.value)
        if gap > LEAST_GAP:
            kept.append((prompt, tuple(tokens)))
    if len(kept) < PROMPTS:
        raise ConfigError(f"seed {seed} gives too few prompts whose answers rounding cannot change; try another --seed")
    plan = Plan(empty.model, tiers, tuple(p for p, _ in kept), tuple(t for _, t in kept), seed, aborts, HBM_BLOCKS)
    (folder / "plan.json").write_text(json.dumps(asdict(plan)), encoding="utf-8")
    return plan
