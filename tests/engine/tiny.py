"""Tiny checkpoints on disk: random weights, one token per byte, made in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kvtier.engine.architecture import ModelConfig, config_from_hf, random_tensors
from kvtier.engine.attention import Chunk
from kvtier.engine.checkpoint import open_checkpoint
from kvtier.engine.model import LlamaModel, StepBatch

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Control tokens, with the first ids; the 256 bytes follow."""
GAP = 1e-2
"""Least distance of the two best logits at every step of a gap checkpoint."""
GAP_STEPS = 24
GAP_PROMPTS = tuple(
    "You are one of many. " * 3 + tail
    for tail in (
        "What is a block?",
        "Who evicts whom, and why?",
        "Where do the bytes live when HBM is full?",
        "0123456789" * 8,
    )
)
"""Prompts that share their beginning: what a gap checkpoint is checked on."""


def make_tiny_checkpoint(
    path: Path,
    seed: int = 0,
    vocab: int = 320,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    hidden: int = 128,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    louder: float = 1.0,
    architecture: str = "LlamaForCausalLM",
) -> Path:
    """Write ``config.json``, ``model.safetensors``, ``tokenizer.json`` and ``tokenizer_config.json`` to ``path``.

    Weights are N(0, 0.12), projections ``louder`` times that, norms N(1, 0.1). ``vocab`` is at least 259.
    """
    raw = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 2 * hidden,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "sliding_window": None,
    }
    path.mkdir(parents=True, exist_ok=True)
    tensors = _weights(config_from_hf(raw, "tiny"), seed, louder)
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(raw))
    (path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    (path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "bos_token": CONTROL[0], "eos_token": CONTROL[2]})
    )
    return path


def _weights(config: ModelConfig, seed: int, louder: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    return {
        name: tensor.normal_(1.0, 0.1, generator=generator)
        if tensor.ndim == 1
        else tensor * (louder if "_proj" in name else 1.0)
        for name, tensor in random_tensors(config, seed).items()
    }


def byte_tokenizer() -> Backend:
    """Byte-level BPE without merges: a token per byte after the control tokens."""
    tokens = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return backend


def make_gap_checkpoint(
    path: Path, prompts: Sequence[str] = GAP_PROMPTS, steps: int = GAP_STEPS, vocab: int = 320
) -> Path:
    """A tiny checkpoint whose two best logits differ by more than `GAP` at every greedy step after each of ``prompts``.

    So rounding cannot change what it generates, and a wrong byte in K or V can. Seeds are tried until one holds, checked
    with bf16 KV.
    """
    for seed in range(100):
        make_tiny_checkpoint(path, seed, vocab=vocab, louder=GAP_LOUDER)
        if smallest_gap(path, prompts, steps) > GAP:
            return path
    raise AssertionError(f"no seed below 100 gives a gap above {GAP}")


GAP_LOUDER = 2.0
"""Projections of gap checkpoints outshout the embedding, so that every token of the prompt counts."""


def smallest_gap(path: Path, prompts: Sequence[str], steps: int, block_tokens: int = 16) -> float:
    """The least distance of the two best logits over ``steps`` greedy tokens after each prompt, all in one batch."""
    checkpoint = open_checkpoint(str(path))
    tokenizer, model = checkpoint.tokenizer(), LlamaModel(checkpoint.config, checkpoint.tensors())
    sequences = [tokenizer.encode(prompt) for prompt in prompts]
    blocks = -(-(max(map(len, sequences)) + steps) // block_tokens)
    tables = [range(i * blocks, (i + 1) * blocks) for i in range(len(sequences))]
    kv = model.allocate_kv(blocks * len(sequences), block_tokens, "bf16")
    logits = model.forward(StepBatch(tuple(Chunk(s, 0, t) for s, t in zip(sequences, tables, strict=True))), kv)
    smallest = float("inf")
    for _ in range(steps):
        best = logits.topk(2, dim=-1)
        smallest = min(smallest, float((best.values[:, 0] - best.values[:, 1]).min()))
        for sequence, token in zip(sequences, best.indices[:, 0].tolist(), strict=True):
            sequence.append(token)
        chunks = (Chunk(s[-1:], len(s) - 1, t) for s, t in zip(sequences, tables, strict=True))
        logits = model.forward(StepBatch(tuple(chunks)), kv)
    return smallest
