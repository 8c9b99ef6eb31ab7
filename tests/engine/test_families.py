"""Every model family against its own ``transformers`` implementation, and the exactness of hits in each."""

from __future__ import annotations

import json
import random
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvtier.engine.architecture import FAMILIES
from kvtier.engine.attention import Chunk
from kvtier.engine.checkpoint import Checkpoint, open_checkpoint
from kvtier.engine.exactness import self_test, settle
from kvtier.engine.model import LlamaModel, StepBatch
from kvtier.errors import ModelError
from kvtier.testing.requirements import require_machine

from .test_checkpoint import edit, write_gguf
from .tiny import make_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK, LENGTH, DECODED, BLOCKS = 16, 300, 20, 24
TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@dataclass(frozen=True)
class Case:
    """One checkpoint as ``transformers`` makes it."""

    model: type[PreTrainedModel]
    config: type[PreTrainedConfig]
    own: dict[str, Any]
    """Fields beside the common ones."""


CASES = {
    "llama": Case(LlamaForCausalLM, LlamaConfig, {}),
    "llama3-rope": Case(LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "mistral": Case(MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral-wide-heads": Case(MistralForCausalLM, MistralConfig, {"sliding_window": None, "head_dim": 48}),
    "qwen2": Case(Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-tied": Case(Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": Case(Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "qwen3-wide-heads": Case(Qwen3ForCausalLM, Qwen3Config, {"head_dim": 48, "tie_word_embeddings": True}),
}


@dataclass(frozen=True)
class Opened:
    """A checkpoint on disk, opened by us, and the logits that ``transformers`` has for a prompt, ``[tokens, vocab]``."""

    path: Path
    checkpoint: Checkpoint
    model: LlamaModel
    tokens: list[int]
    logits: torch.Tensor


@pytest.fixture(scope="module", params=CASES)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    name: str = request.param
    case = CASES[name]
    path = tmp_path_factory.mktemp(name)
    common: dict[str, Any] = {
        "vocab_size": 500,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
    }
    config = case.config(**{**common, **case.own})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = case.model._from_config(config, attn_implementation="eager")  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            if parameter_name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.3, generator=generator)
            else:
                parameter.normal_(0.0, 0.5 if parameter_name.endswith("bias") else 0.12, generator=generator)
    theirs.train(mode=False)
    theirs.save_pretrained(path)
    chance = random.Random(2)
    tokens = [chance.randrange(500) for _ in range(LENGTH)]
    with torch.inference_mode():
        logits: torch.Tensor = theirs(torch.tensor([tokens])).logits[0]
    checkpoint = open_checkpoint(str(path))
    model = LlamaModel(checkpoint.config, checkpoint.tensors())
    settle(model, "fp32", BLOCK)
    return Opened(path, checkpoint, model, tokens, logits)


@pytest.mark.parametrize("chunk", [LENGTH, 77])
def test_logits_are_those_of_transformers(opened: Opened, chunk: int) -> None:
    """Prefill in one go and in chunks, then decoding token by token, through a shuffled block table and fp32 K and V."""
    model, tokens = opened.model, opened.tokens
    kv = model.allocate_kv(BLOCKS, BLOCK, "fp32")
    table = random.Random(3).sample(range(BLOCKS), BLOCKS)
    end = LENGTH - DECODED
    bounds = [*range(0, end, chunk), *range(end, LENGTH)]
    rows = [
        model.forward(StepBatch((Chunk(tokens[start:stop], start, table, "all"),)), kv)
        for start, stop in zip(bounds, [*bounds[1:], LENGTH], strict=True)
    ]
    ours = torch.cat(rows)
    difference = float((ours - opened.logits).abs().max())
    print(f"largest difference of logits {difference:.1e}, largest logit {float(opened.logits.abs().max()):.1f}")
    assert difference <= TOLERANCE
    assert torch.equal(ours.argmax(-1), opened.logits.argmax(-1))


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp32"])
def test_hits_are_bit_equal_to_cold_runs(opened: Opened, kv_dtype: str, tmp_path: Path) -> None:
    plain = open_checkpoint(str(make_tiny_checkpoint(tmp_path)))
    require_machine(
        settle(LlamaModel(plain.config, plain.tensors()), kv_dtype, BLOCK), "the self-test finds no bit-equality here"
    )
    settle(opened.model, kv_dtype, BLOCK)
    assert self_test(opened.model, kv_dtype, BLOCK)


def test_dummy_weights_fill_every_tensor(opened: Opened) -> None:
    dummy = open_checkpoint(str(opened.path), "dummy", seed=5)
    tensors = dummy.tensors()
    assert tensors.keys() == opened.checkpoint.tensors().keys()
    for name, tensor in tensors.items():
        assert bool((tensor == 1).all()) == name.endswith("norm.weight"), name
    model = LlamaModel(dummy.config, tensors)
    kv = model.allocate_kv(BLOCKS, BLOCK, "bf16")
    logits = model.forward(StepBatch((Chunk(opened.tokens, 0, range(BLOCKS)),)), kv)
    assert bool(logits.isfinite().all())
    assert float(logits.std()) > 0.1


def test_rope_scaling_is_read_from_old_and_new_configs(tmp_path: Path) -> None:
    """``rope_scaling`` beside ``rope_theta`` (Llama 3.1 as published) and ``rope_parameters`` (today) say the same."""
    old, new = (make_tiny_checkpoint(tmp_path / name) for name in ("old", "new"))
    edit(new, rope_parameters=LLAMA3, rope_theta=None)
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    edit(old, rope_scaling=scaling, rope_theta=LLAMA3["rope_theta"])
    one, two = (replace(open_checkpoint(str(path)).config, name="same") for path in (old, new))
    assert one == two
    assert one.rope_divisors is not None
    assert len(set(one.rope_divisors)) > 2, "kept, blended and stretched wavelengths"


def test_the_order_of_rope_pairs_holds_for_biases_and_norms(opened: Opened) -> None:
    """What is added before rope and what scales after it is as wrong as a wrong projection when its order is another."""
    tensors = opened.checkpoint.tensors()
    moved = [name for name in tensors if name.endswith(("k_proj.bias", "k_norm.weight"))]
    for name in moved:
        tensors[name] = tensors[name].flip(0)
    kv = opened.model.allocate_kv(BLOCKS, BLOCK, "fp32")
    model = LlamaModel(opened.checkpoint.config, tensors)
    logits = model.forward(StepBatch((Chunk(opened.tokens, 0, range(BLOCKS), "all"),)), kv)
    assert bool(((logits - opened.logits).abs().max() > 0.1) == bool(moved))


WINDOWED = "a sliding window"


@pytest.mark.parametrize(
    ("architecture", "fields", "refused"),
    [
        ("LlamaForCausalLM", {}, None),
        ("LlamaForCausalLM", {"sliding_window": 4096}, WINDOWED),
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("MistralForCausalLM", {}, WINDOWED),
        ("MistralForCausalLM", {"sliding_window": 4096}, WINDOWED),
        ("MistralForCausalLM", {"sliding_window": 4096, "use_sliding_window": False}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 131072}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 131072, "use_sliding_window": False}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 131072, "use_sliding_window": True}, WINDOWED),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": None}, None),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 1024}, WINDOWED),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, WINDOWED),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 2}, None),
        ("Qwen3ForCausalLM", {"attention_bias": True}, "attention biases"),
        ("Qwen2MoeForCausalLM", {}, "Qwen2MoeForCausalLM"),
        ("Qwen3MoeForCausalLM", {}, "Qwen3MoeForCausalLM"),
    ],
)
def test_windows_and_relatives_are_refused_by_name(
    tmp_path: Path, architecture: str, fields: dict[str, object], refused: str | None
) -> None:
    path = make_tiny_checkpoint(tmp_path)
    raw = json.loads((path / "config.json").read_text())
    del raw["sliding_window"]
    (path / "config.json").write_text(json.dumps({**raw, "architectures": [architecture], **fields}))
    if refused is None:
        open_checkpoint(str(path), "dummy")
        return
    with pytest.raises(ModelError, match=refused):
        open_checkpoint(str(path), "dummy")


def test_a_config_without_architectures_goes_by_its_model_type(tmp_path: Path) -> None:
    for architecture, family in FAMILIES.items():
        path = make_tiny_checkpoint(tmp_path / family.model_type, architecture=architecture)
        raw = json.loads((path / "config.json").read_text())
        del raw["architectures"]
        (path / "config.json").write_text(json.dumps(raw))
        config = open_checkpoint(str(path)).config
        assert (config.qkv_bias, config.qk_norm) == (family.qkv_bias, family.qk_norm)


def test_a_qwen3_config_without_head_dim_means_128(tmp_path: Path) -> None:
    """As ``Qwen3Config`` does; elsewhere it is the hidden size shared out."""
    path = make_tiny_checkpoint(tmp_path, architecture="Qwen3ForCausalLM")
    assert open_checkpoint(str(edit(path, head_dim=None)), "dummy").config.head_dim == 128


def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path)
    with pytest.raises(ModelError, match=r"self_attn\.k_proj\.bias"):
        open_checkpoint(str(edit(path, architectures=["Qwen2ForCausalLM"]))).tensors()


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_gguf_files_of_qwen(tmp_path: Path, architecture: str) -> None:
    """The converter leaves Qwen's projections in halves, and its tokenizer splits off every digit."""
    directory = make_tiny_checkpoint(tmp_path / "tiny", architecture=architecture, head_dim=16, tied=True)
    file = write_gguf(tmp_path / "tiny.gguf", directory, gguf.GGMLQuantizationType.F32, pre="qwen2")
    original, converted = open_checkpoint(str(directory)), open_checkpoint(str(file))
    one, two = original.tensors(), converted.tensors()
    assert one.keys() == two.keys() == load_file(directory / "model.safetensors").keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert replace(converted.config, name="", dtype="", rms_eps=0) == replace(
        original.config, name="", dtype="", rms_eps=0
    )
    text = "Größe 123 <|im_end|>"
    assert converted.tokenizer().encode(text) == original.tokenizer().encode(text)


def test_gguf_files_with_a_window_are_refused_by_name(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint(tmp_path / "tiny", architecture="Qwen2ForCausalLM")
    file = write_gguf(tmp_path / "w.gguf", directory, gguf.GGMLQuantizationType.F32, window=64)
    with pytest.raises(ModelError, match=WINDOWED):
        open_checkpoint(str(file))
