"""Opening models: what is read, what is refused, and what names the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvtier.engine.architecture import config_from_hf
from kvtier.engine.checkpoint import effective_kv_dtype, open_checkpoint
from kvtier.errors import ModelError
from kvtier.layout import GroupKind

from .conftest import RealModel
from .tiny import CONTROL, TEMPLATE, byte_tokenizer, make_tiny_checkpoint


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "tiny")


def edit(directory: Path, **fields: object) -> Path:
    """Change fields of a directory's config.json; None removes one."""
    path = directory / "config.json"
    raw = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return directory


def interleaved(weights: torch.Tensor, heads: int) -> np.ndarray:
    """llama.cpp's ``permute`` of ``convert_hf_to_gguf.py``, as it is written there."""
    shape = weights.shape
    array: np.ndarray = weights.numpy()
    swapped: np.ndarray = array.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    return swapped


def write_gguf(path: Path, directory: Path, quantise: gguf.GGMLQuantizationType, **metadata: int | str) -> Path:
    """The checkpoint in ``directory`` as llama.cpp's converter would write it."""
    raw = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    architecture = str(metadata.get("architecture", raw["model_type"]))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_key_length(raw["head_dim"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_theta"])
    if "scaling" in metadata:
        writer.add_rope_scaling_type(gguf.RopeScalingType(metadata["scaling"]))
        writer.add_rope_scaling_factor(4.0)
    if "window" in metadata:
        writer.add_sliding_window(int(metadata["window"]))
    vocabulary = byte_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    tokens += ["QZ", *(f"<unused{i}>" for i in range(raw["vocab_size"] - len(tokens) - 1))]
    writer.add_tokenizer_model(str(metadata.get("vocabulary", "gpt2")))
    writer.add_tokenizer_pre(str(metadata.get("pre", "smollm")))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROL else 1 for token in tokens])
    writer.add_token_merges(["Q Z"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    inner = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in tensors.items():
        stem, kept = name.rsplit(".", 1)
        if stem in outer:
            to, data = outer[stem], tensor.numpy()
        else:
            _, _, layer, part = stem.split(".", 3)
            to, data = f"blk.{layer}.{inner[part]}", tensor.numpy()
            if architecture == "llama" and part == "self_attn.q_proj":
                data = interleaved(tensor, raw["num_attention_heads"])
            elif architecture == "llama" and part == "self_attn.k_proj":
                data = interleaved(tensor, raw["num_key_value_heads"])
        kind = quantise if data.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{to}.{kept}", gguf.quants.quantize(np.ascontiguousarray(data), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_directory_gives_config_tensors_and_tokenizer(tiny: Path) -> None:
    checkpoint = open_checkpoint(str(tiny))
    config = checkpoint.config
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim) == (2, 128, 4, 2, 32)
    assert (config.vocab, config.max_positions, config.bos_id, config.eos_ids) == (320, 2048, 0, (2,))
    tensors = checkpoint.tensors()
    stored = load_file(tiny / "model.safetensors")
    assert tensors.keys() == stored.keys()
    assert all(torch.equal(tensors[name], stored[name]) for name in stored)
    vocabulary = json.loads((tiny / "tokenizer.json").read_text())["model"]["vocab"]
    assert checkpoint.tokenizer().encode("ab") == [vocabulary["a"], vocabulary["b"]]


def test_shards_are_joined_and_have_the_same_fingerprint_as_one_file(tiny: Path, tmp_path: Path) -> None:
    whole = open_checkpoint(str(tiny))
    sharded = tmp_path / "sharded"
    shutil.copytree(tiny, sharded)
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:7], "model-2.safetensors": names[7:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, sharded / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    opened = open_checkpoint(str(sharded))
    assert opened.weights_id == whole.weights_id
    assert opened.tensors().keys() == tensors.keys()
    (sharded / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2\.safetensors is missing"):
        open_checkpoint(str(sharded))


def test_the_fingerprint_sees_one_changed_weight_and_one_changed_setting(tiny: Path, tmp_path: Path) -> None:
    before = open_checkpoint(str(tiny)).weights_id
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    assert open_checkpoint(str(other)).weights_id == before, "a copy under another name is the same model"
    assert open_checkpoint(str(edit(other, rope_theta=10001.0))).weights_id != before
    tensors = load_file(edit(other, rope_theta=10000.0) / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] += 1e-3
    save_file(tensors, other / "model.safetensors")
    assert open_checkpoint(str(other)).weights_id != before


def test_a_hub_snapshot_is_named_by_its_repository_and_revision(tiny: Path, tmp_path: Path) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / revision
    shutil.copytree(tiny, snapshot)
    checkpoint = open_checkpoint(str(snapshot))
    assert (checkpoint.name, checkpoint.weights_id) == ("someone/tiny", revision)
    assert open_checkpoint(str(snapshot), name="mine").name == "mine"
    assert open_checkpoint(str(snapshot), revision="main").weights_id == revision, "a branch may have moved on"
    quantized = snapshot.with_name("fedcba98")
    quantized.mkdir()
    write_gguf(quantized / "tiny.gguf", tiny, gguf.GGMLQuantizationType.F32)
    assert open_checkpoint(str(quantized), revision="main").weights_id == "fedcba98"


def test_identity_and_layout(tiny: Path) -> None:
    checkpoint = open_checkpoint(str(tiny))
    identity = checkpoint.identity(block_tokens=8)
    assert (identity.model, identity.weights, identity.kv_dtype) == ("tiny", checkpoint.weights_id, "bf16")
    assert identity.layout.block_bytes == 8 * 2 * 2 * 2 * 32 * 2
    assert identity.layout.groups[0].kind is GroupKind.GQA
    overridden = open_checkpoint(str(tiny), rope={"rope_type": "linear", "factor": 2.0})
    assert overridden.rope == '{"factor":2.0,"rope_type":"linear"}'
    assert overridden.config.rope_divisors == (2.0,) * 16
    assert overridden.identity(8).digest() != identity.digest()


@pytest.mark.parametrize(
    ("native", "asked", "effective"),
    [
        ("bfloat16", "auto", "bf16"),
        ("float16", "auto", "fp16"),
        ("float32", "auto", "bf16"),
        ("bfloat16", "fp32", "fp32"),
    ],
)
def test_the_kv_dtype_follows_a_16_bit_checkpoint(tiny: Path, native: str, asked: str, effective: str) -> None:
    checkpoint = open_checkpoint(str(edit(tiny, torch_dtype=native)))
    assert effective_kv_dtype(checkpoint.config, asked) == effective
    with pytest.raises(ModelError, match="int4"):
        effective_kv_dtype(checkpoint.config, "int4")


def test_dummy_weights_need_no_file_and_depend_on_the_seed_alone(tiny: Path) -> None:
    (tiny / "model.safetensors").unlink()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tiny / file).unlink()
    first, again, other = (
        open_checkpoint(str(path), "dummy", seed=seed)
        for path, seed in ((tiny, 1), (tiny / "config.json", 1), (tiny, 2))
    )
    assert first.weights_id == again.weights_id != other.weights_id
    one, two = first.tensors(), again.tensors()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert one["model.layers.0.mlp.up_proj.weight"].std() == pytest.approx(0.12, rel=0.02)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        first.tokenizer()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"attention_bias": True}, "attention bias"),
        ({"mlp_bias": True}, "MLP bias"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial rope"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"eos_token_id": "2"}, "token ids"),
        ({"vocab_size": 0}, "positive"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tiny: Path, fields: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        open_checkpoint(str(edit(tiny, **fields)))


def test_llama3_rope_scaling_is_that_of_transformers() -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    raw: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "vocab_size": 8,
        "max_position_embeddings": 131072,
        "rope_parameters": parameters,
    }
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig.from_dict(raw), torch.device("cpu"))
    config = config_from_hf(raw, "x")
    assert config.rope_divisors is not None
    plain = 1.0 / (500000.0 ** (torch.arange(0, 128, 2).float() / 128))
    torch.testing.assert_close(plain / torch.tensor(config.rope_divisors), theirs, rtol=1e-5, atol=0)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def scribble(path: Path) -> None:
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])


def pickled(path: Path) -> None:
    path.rename(path.with_name("pytorch_model.bin"))


def misshapen(path: Path) -> None:
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, path)


def without_one(path: Path) -> None:
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)


def with_one_more(path: Path) -> None:
    save_file({**load_file(path), "model.layers.0.self_attn.q_proj.bias": torch.ones(128)}, path)


def integers(path: Path) -> None:
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate, "not a readable safetensors file"),
        (scribble, "not a readable safetensors file"),
        (pickled, "never loaded"),
        (Path.unlink, "no weights"),
        (misshapen, r"model\.norm\.weight is \(7,\)"),
        (without_one, r"missing, first model\.norm\.weight"),
        (with_one_more, r"q_proj\.bias"),
        (integers, "int8"),
    ],
)
def test_damaged_weights_are_one_clear_error(tiny: Path, damage: Callable[[Path], None], says: str) -> None:
    damage(tiny / "model.safetensors")
    with pytest.raises(ModelError, match=says):
        open_checkpoint(str(tiny)).tensors()


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00"])
def test_a_damaged_config_is_one_clear_error(tiny: Path, text: str) -> None:
    (tiny / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        open_checkpoint(str(tiny))


def test_nothing_there_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="no model at"):
        open_checkpoint(str(tmp_path / "absent" / "deep"))
    with pytest.raises(ModelError, match="neither"):
        open_checkpoint(str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot read x+: File name too long"):
        open_checkpoint("x" * 300)
    with pytest.raises(ModelError, match="nobody/nothing is no local path and the hub did not give it"):
        open_checkpoint("nobody/nothing")
    (tmp_path / "weights.pt").write_bytes(b"\x80\x02")
    with pytest.raises(ModelError, match="never loaded"):
        open_checkpoint(str(tmp_path / "weights.pt"))


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_gives_the_weights_it_was_made_from(tmp_path: Path, tied: bool) -> None:
    directory = make_tiny_checkpoint(tmp_path / "tiny", tied=tied)
    file = write_gguf(tmp_path / "tiny.gguf", directory, gguf.GGMLQuantizationType.F32)
    original, converted = open_checkpoint(str(directory)), open_checkpoint(str(file))
    one, two = original.tensors(), converted.tensors()
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert converted.config.tie_embeddings is tied
    assert converted.name == "tiny"
    text = "Größe 123 <|im_end|>"
    assert converted.tokenizer().encode(text) == original.tokenizer().encode(text)
    assert converted.tokenizer().encode("QZ") == [259]
    assert converted.tokenizer().apply_chat_template([{"role": "user", "content": "x"}])


def test_quantised_gguf_weights_are_near_and_fingerprinted_as_stored(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint(tmp_path / "tiny")
    kinds = gguf.GGMLQuantizationType
    files = {
        kind: write_gguf(tmp_path / f"{kind.name}.gguf", directory, kind)
        for kind in (kinds.Q8_0, kinds.F16, kinds.BF16)
    }
    exact = open_checkpoint(str(directory)).tensors()
    opened = {kind: open_checkpoint(str(file)) for kind, file in files.items()}
    for checkpoint in opened.values():
        for name, tensor in checkpoint.tensors().items():
            torch.testing.assert_close(tensor, exact[name], atol=5e-3, rtol=5e-3)
    assert len({checkpoint.weights_id for checkpoint in opened.values()}) == 3
    assert {kind.name: checkpoint.config.dtype for kind, checkpoint in opened.items()} == {
        "Q8_0": "fp32",
        "F16": "fp16",
        "BF16": "bf16",
    }


def test_gguf_files_that_are_not_supported_or_broken(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint(tmp_path / "tiny")
    kind = gguf.GGMLQuantizationType.F32
    with pytest.raises(ModelError, match="'qwen9'"):
        open_checkpoint(str(write_gguf(tmp_path / "q.gguf", directory, kind, architecture="qwen9")))
    with pytest.raises(ModelError, match="yarn"):
        open_checkpoint(str(write_gguf(tmp_path / "y.gguf", directory, kind, scaling="yarn")))
    with pytest.raises(ModelError, match="'llama'"):
        open_checkpoint(str(write_gguf(tmp_path / "v.gguf", directory, kind, vocabulary="llama")))
    whole = write_gguf(tmp_path / "w.gguf", directory, kind)
    raw = whole.read_bytes()
    for index, broken in enumerate(
        (b"", b"GGUF", raw[:100], raw[:5000], raw[:-1000], b"\xff" * 100, raw[:8] + b"\xff" * 100)
    ):
        path = tmp_path / f"broken{index}.gguf"
        path.write_bytes(broken)
        with pytest.raises(ModelError, match="GGUF"):
            open_checkpoint(str(path)).tensors()
    with pytest.raises(ModelError, match="rope overrides"):
        open_checkpoint(str(whole), rope={"rope_theta": 1.0})


def test_a_directory_with_one_gguf_file(tmp_path: Path) -> None:
    source = make_tiny_checkpoint(tmp_path / "source")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_gguf(folder / "one.gguf", source, gguf.GGMLQuantizationType.F32)
    assert open_checkpoint(str(folder)).name == "one"
    shutil.copy(folder / "one.gguf", folder / "two.gguf")
    with pytest.raises(ModelError, match=r"2 \.gguf files"):
        open_checkpoint(str(folder))


@pytest.mark.model
def test_the_default_model(smollm2: RealModel) -> None:
    config = smollm2.checkpoint.config
    assert (config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert (config.rope_theta, config.max_positions, config.tie_embeddings) == (100000.0, 8192, True)
    identity = smollm2.checkpoint.identity(block_tokens=16)
    assert (identity.model, identity.kv_dtype, identity.layout.block_bytes) == (
        "SmolLM2-135M-Instruct",
        "bf16",
        360 * 1024,
    )
