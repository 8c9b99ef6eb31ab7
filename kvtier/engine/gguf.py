"""Checkpoints as GGUF files, dequantised to float32 on load."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize

from kvtier.engine.architecture import FAMILIES, ModelConfig, rope_divisors
from kvtier.engine.tokenizer import TokenizerSource, Vocabulary
from kvtier.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4
"""GGUF token types that text matches as a whole."""

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_FAMILIES = {family.model_type: family for family in FAMILIES.values() if family.model_type != "mistral"}
"""By ``general.architecture``; llama.cpp's converter writes Mistral as llama."""
_INTERLEAVED = "llama"
"""The architecture whose q and k projections the converter writes in interleaved pairs."""


class _PlainReader(GGUFReader):
    """Reads the header through a plain view of the file: of a memmap every slice is one, and vocabularies take 10^5 of them."""

    @property
    def data(self) -> Any:  # noqa: ANN401 - no memmap, as its base has it
        return self._plain

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._plain = mapped.view(np.ndarray)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One opened GGUF file. Raises `ModelError` from every method for what is malformed or not supported."""

    path: Path
    reader: GGUFReader

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        try:
            return cls(path, _PlainReader(path))
        except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise ModelError(f"{path} is not a readable GGUF file ({error}); download the model again") from error

    def config(self, name: str) -> ModelConfig:
        """The geometry in the file's metadata."""
        kind = self._architecture
        family = _FAMILIES.get(kind)
        if family is None:
            known = ", ".join(_FAMILIES)
            raise ModelError(f"{name}: GGUF architecture {kind!r} is not supported ({known} are)")
        heads, hidden = self._integer(f"{kind}.attention.head_count"), self._integer(f"{kind}.embedding_length")
        head_dim = self._integer(f"{kind}.attention.key_length", hidden // max(heads, 1))
        if self._integer(f"{kind}.rope.dimension_count", head_dim) != head_dim:
            raise ModelError(f"{name}: partial rope is not supported")
        if self._value(f"{kind}.expert_count"):
            raise ModelError(f"{name}: mixtures of experts are not supported")
        if self._value(f"{kind}.attention.sliding_window"):
            raise ModelError(f"{name}: a sliding window is not supported")
        theta = self._number(f"{kind}.rope.freq_base", 10000.0)
        tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        if "token_embd.weight" not in tensors:
            raise ModelError(f"{name}: the GGUF file has no token_embd.weight; download the model again")
        eos = self._value("tokenizer.ggml.eos_token_id")
        bos = self._value("tokenizer.ggml.bos_token_id")
        return ModelConfig(
            name=name,
            layers=self._integer(f"{kind}.block_count"),
            hidden=hidden,
            heads=heads,
            kv_heads=self._integer(f"{kind}.attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate=self._integer(f"{kind}.feed_forward_length"),
            vocab=int(tensors["token_embd.weight"].shape[1]),
            rms_eps=self._number(f"{kind}.attention.layer_norm_rms_epsilon"),
            rope_theta=theta,
            max_positions=self._integer(f"{kind}.context_length"),
            tie_embeddings="output.weight" not in tensors,
            dtype=self._native_dtype(),
            rope_divisors=self._rope_divisors(tensors.get(_ROPE_FACTORS), theta, head_dim, name),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            bos_id=bos if isinstance(bos, int) else None,
            eos_ids=(eos,) if isinstance(eos, int) else (),
        )

    def tokenizer_source(self) -> TokenizerSource:
        """The vocabulary and chat template in the file's metadata."""
        model = self._text("tokenizer.ggml.model")
        if model != "gpt2":
            raise ModelError(
                f"{self.path.name}: GGUF vocabularies of kind {model!r} are not supported (gpt2 is); "
                "use the model's safetensors directory"
            )
        tokens = self._texts("tokenizer.ggml.tokens")
        kinds = self._value("tokenizer.ggml.token_type") or []
        if not isinstance(kinds, list) or len(kinds) not in (0, len(tokens)):
            raise ModelError(
                f"{self.path.name}: {len(tokens)} tokens do not match their types; download the model again"
            )
        names = {}
        for key in ("bos", "eos", "padding", "unknown"):
            index = self._value(f"tokenizer.ggml.{key}_token_id")
            if isinstance(index, int) and 0 <= index < len(tokens):
                names[{"padding": "pad", "unknown": "unk"}.get(key, key) + "_token"] = tokens[index]
        bos = self._value("tokenizer.ggml.bos_token_id")
        adds_bos = bool(self._value("tokenizer.ggml.add_bos_token"))
        template = self._value("tokenizer.chat_template")
        return TokenizerSource(
            Vocabulary(
                pre=str(self._value("tokenizer.ggml.pre") or "default"),
                tokens=tokens,
                merges=self._texts("tokenizer.ggml.merges"),
                special=frozenset(index for index, kind in enumerate(kinds) if kind == _CONTROL),
                added=frozenset(index for index, kind in enumerate(kinds) if kind == _USER_DEFINED),
                prefix=(bos,) if adds_bos and isinstance(bos, int) else (),
            ),
            chat_template=template if isinstance(template, str) else None,
            special=names,
        )

    def raw_tensors(self) -> Iterator[tuple[str, str, tuple[int, ...], np.ndarray]]:
        """Name, quantisation, shape and bytes of every tensor as stored, for the fingerprint."""
        for tensor in self.reader.tensors:
            shape = tuple(int(size) for size in tensor.shape)
            yield (
                tensor.name,
                tensor.tensor_type.name,
                shape,
                np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1),
            )

    def tensors(self, config: ModelConfig) -> dict[str, torch.Tensor]:
        """Every tensor in float32 under its Hugging Face name, q and k with their halves apart."""
        wanted = [tensor for tensor in self.reader.tensors if tensor.name != _ROPE_FACTORS]
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # numpy releases the GIL in what dequantising spends
            return dict(pool.map(lambda tensor: self._dequantised(tensor, config), wanted))

    def _dequantised(self, tensor: ReaderTensor, config: ModelConfig) -> tuple[str, torch.Tensor]:
        name = self._canonical(tensor.name, config.name)
        try:
            values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise ModelError(f"{config.name}: quantisation {tensor.tensor_type.name} is not supported") from error
        weights = torch.from_numpy(values)
        if self._architecture != _INTERLEAVED:
            return name, weights
        if name.endswith("self_attn.q_proj.weight"):
            weights = _halves(weights, config.heads)
        elif name.endswith("self_attn.k_proj.weight"):
            weights = _halves(weights, config.kv_heads)
        return name, weights

    @property
    def _architecture(self) -> str:
        return self._text("general.architecture")

    def _canonical(self, name: str, model: str) -> str:
        if name in _OUTER:
            return _OUTER[name]
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in _INNER and parts[3] in ("weight", "bias"):
            return f"model.layers.{parts[1]}.{_INNER[parts[2]]}.{parts[3]}"
        raise ModelError(f"{model}: GGUF tensor {name} is not supported in the {self._architecture} architecture")

    def _native_dtype(self) -> str:
        """The 16-bit dtype that most bytes are in, ``fp32`` where they are in something else."""
        sizes: dict[GGMLQuantizationType, int] = {}
        for tensor in self.reader.tensors:
            sizes[tensor.tensor_type] = sizes.get(tensor.tensor_type, 0) + int(tensor.n_bytes)
        most = max(sizes, key=lambda kind: sizes[kind])
        return {GGMLQuantizationType.F16: "fp16", GGMLQuantizationType.BF16: "bf16"}.get(most, "fp32")

    def _rope_divisors(
        self, factors: ReaderTensor | None, theta: float, head_dim: int, name: str
    ) -> tuple[float, ...] | None:
        if factors is not None:
            return tuple(float(factor) for factor in np.asarray(factors.data, dtype=np.float32).reshape(-1))
        scaling = f"{self._architecture}.rope.scaling"
        kind = self._value(f"{scaling}.type")
        if kind in (None, "none"):
            return None
        factor = self._value(f"{scaling}.factor")
        return rope_divisors({"rope_type": kind, "factor": factor}, theta, head_dim, name)

    def _value(self, key: str) -> object:
        entry = self.reader.fields.get(key)
        try:
            return None if entry is None else entry.contents()
        except (ValueError, IndexError) as error:
            raise ModelError(
                f"{self.path.name}: metadata {key} is malformed ({error}); download the model again"
            ) from error

    def _text(self, key: str) -> str:
        value = self._value(key)
        if not isinstance(value, str):
            raise ModelError(f"{self.path.name}: GGUF metadata {key} is missing; download the model again")
        return value

    def _texts(self, key: str) -> tuple[str, ...]:
        value = self._value(key)
        if not isinstance(value, list):
            raise ModelError(f"{self.path.name}: GGUF metadata {key} is missing; download the model again")
        return tuple(map(str, value))

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int):
            raise ModelError(f"{self.path.name}: GGUF metadata {key} must be one integer, is {value!r}")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._value(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float):
            raise ModelError(f"{self.path.name}: GGUF metadata {key} must be a number, is {value!r}")
        return float(value)


def _halves(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows from rope's interleaved pairs, as llama.cpp's converter writes them, back to the two halves of each head.

    The inverse of ``LlamaModel.permute`` in llama.cpp's ``convert_hf_to_gguf.py``.
    """
    rows, columns = weights.shape
    if rows % (2 * heads):
        raise ModelError(f"{rows} projection rows do not split over {heads} heads; the GGUF file is malformed")
    return weights.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
