"""The geometry of a model and the tensors it consists of: the Llama family, everything else refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvtier.errors import ModelError
from kvtier.layout import CacheGroup, GroupKind, Layout


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture has beyond Llama's plain shape, and what its ``config.json`` means by silence."""

    model_type: str
    """``model_type`` of ``config.json``, ``general.architecture`` of a GGUF file."""
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    """Where the config names none; None: the hidden size shared out between the heads."""
    window: int | None = None
    """Sliding window where the config names none, in tokens."""
    windows_unasked: bool = True
    """A window holds although ``use_sliding_window`` is absent."""


FAMILIES = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family("mistral", window=4096),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, windows_unasked=False),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, head_dim=128, windows_unasked=False),
}
"""By Hugging Face architecture; what is assumed where a config is silent is what ``transformers`` assumes."""

DUMMY_DEVIATION = 0.12
"""Standard deviation of random weights: wide enough that the best token depends on the whole prefix."""

_NATIVE_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What fixes a model's shapes and arithmetic, apart from its weights."""

    name: str
    """Model name; never a path."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rms_eps: float
    rope_theta: float
    max_positions: int
    """Longest context the model was trained for, in tokens."""
    tie_embeddings: bool
    """The output projection is the embedding."""
    dtype: str
    """Dtype of the weights as published: ``bf16``, ``fp16``, or ``fp32`` (also for quantised files)."""
    rope_divisors: tuple[float, ...] | None = None
    """Each rope frequency is divided by its entry (``head_dim / 2`` of them); None where there is no rope scaling."""
    qkv_bias: bool = False
    """The projections to queries, keys and values add a bias."""
    qk_norm: bool = False
    """Every head of queries and keys goes through a root-mean-square norm before rope."""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = (self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim, self.intermediate, self.vocab)
        if min(sizes) < 1 or self.max_positions < 1:
            raise ModelError(f"{self.name}: every size in a model's config must be positive: {self}")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.name}: {self.heads} heads do not share {self.kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"{self.name}: an odd head_dim ({self.head_dim}) is not supported")
        if self.rope_divisors is not None and len(self.rope_divisors) != self.head_dim // 2:
            raise ModelError(f"{self.name}: {len(self.rope_divisors)} rope factors for head_dim {self.head_dim}")

    def layout(self, block_tokens: int, kv_dtype: str) -> Layout:
        """Geometry of a block of this model with K and V in ``kv_dtype`` (a resolved one, not ``auto``)."""
        kind = GroupKind.MHA if self.kv_heads == self.heads else GroupKind.MQA if self.kv_heads == 1 else GroupKind.GQA
        return Layout((CacheGroup(kind, self.layers, self.kv_heads, self.head_dim, kv_dtype),), block_tokens)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor by its Hugging Face Llama name, with its shape."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (self.hidden,)
            shapes[prefix + "self_attn.q_proj.weight"] = (queries, self.hidden)
            shapes[prefix + "self_attn.k_proj.weight"] = (keys, self.hidden)
            shapes[prefix + "self_attn.v_proj.weight"] = (keys, self.hidden)
            shapes[prefix + "self_attn.o_proj.weight"] = (self.hidden, queries)
            if self.qkv_bias:
                shapes[prefix + "self_attn.q_proj.bias"] = (queries,)
                shapes[prefix + "self_attn.k_proj.bias"] = (keys,)
                shapes[prefix + "self_attn.v_proj.bias"] = (keys,)
            if self.qk_norm:
                shapes[prefix + "self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[prefix + "self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[prefix + "post_attention_layernorm.weight"] = (self.hidden,)
            shapes[prefix + "mlp.gate_proj.weight"] = (self.intermediate, self.hidden)
            shapes[prefix + "mlp.up_proj.weight"] = (self.intermediate, self.hidden)
            shapes[prefix + "mlp.down_proj.weight"] = (self.hidden, self.intermediate)
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes


def random_tensors(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Seeded float32 weights N(0, `DUMMY_DEVIATION`) for every tensor of ``config``; norms are one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape)
        if name.endswith("norm.weight")
        else torch.empty(shape).normal_(0.0, DUMMY_DEVIATION, generator=generator)
        for name, shape in config.tensor_shapes().items()
    }


def config_from_hf(raw: Mapping[str, object], name: str, rope: Mapping[str, object] | None = None) -> ModelConfig:
    """The config that a ``config.json`` describes; ``rope`` overrides its rope parameters.

    Raises `ModelError` naming what is missing or not supported.
    """
    family = _family(raw, name)
    _refuse_unsupported(raw, family, name)
    fields = _Fields(raw, name)
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", family.head_dim or hidden // max(heads, 1))
    parameters = {**_mapping(raw.get("rope_scaling")), **_mapping(raw.get("rope_parameters")), **(rope or {})}
    theta = float(_number(parameters.get("rope_theta", raw.get("rope_theta", 10000.0)), name, "rope_theta"))
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    return ModelConfig(
        name=name,
        layers=fields.integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate=fields.integer("intermediate_size"),
        vocab=fields.integer("vocab_size"),
        rms_eps=float(_number(raw.get("rms_norm_eps", 1e-6), name, "rms_norm_eps")),
        rope_theta=theta,
        max_positions=fields.integer("max_position_embeddings", 2048),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=_NATIVE_DTYPES.get(dtype, "fp32"),
        rope_divisors=rope_divisors(parameters, theta, head_dim, name),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        bos_id=next(iter(_token_ids(raw.get("bos_token_id"), name)), None),
        eos_ids=_token_ids(raw.get("eos_token_id"), name),
    )


def rope_divisors(parameters: Mapping[str, object], theta: float, head_dim: int, name: str) -> tuple[float, ...] | None:
    """What each rope frequency is divided by under ``parameters`` (``rope_type`` default, linear or llama3).

    The llama3 rule is the one of ``transformers``' ``_compute_llama3_parameters``: long wavelengths are stretched by
    ``factor``, short ones kept, those between blended. Raises `ModelError` for another kind.
    """
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ModelError(f"{name}: rope scaling of kind {kind!r} is not supported (default, linear and llama3 are)")

    def number(key: str) -> float:
        return float(_number(parameters.get(key), name, key))

    factor = number("factor")
    if kind == "linear":
        return (factor,) * (head_dim // 2)
    low, high, original = (
        number(k) for k in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    divisors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        blend = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - blend) / factor + blend))
    return tuple(divisors)


def _family(raw: Mapping[str, object], name: str) -> Family:
    kind = raw.get("model_type")
    declared = raw.get("architectures") or [each for each, family in FAMILIES.items() if family.model_type == kind]
    for architecture in declared if isinstance(declared, list) else ():
        if str(architecture) in FAMILIES:
            return FAMILIES[str(architecture)]
    known = ", ".join(sorted(FAMILIES))
    raise ModelError(f"{name}: architecture {declared or kind!r} is not supported ({known} are)")


def _refuse_unsupported(raw: Mapping[str, object], family: Family, name: str) -> None:
    kinds = raw.get("layer_types")
    windowed = raw.get("sliding_window", family.window) and raw.get("use_sliding_window", family.windows_unasked)
    refused = {
        "attention biases": raw.get("attention_bias"),
        "MLP biases": raw.get("mlp_bias"),
        "a sliding window": windowed or (isinstance(kinds, list) and "sliding_attention" in kinds),
        "quantised weights": raw.get("quantization_config"),
    }
    for what, present in refused.items():
        if present:
            raise ModelError(f"{name}: {what} in config.json: not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{name}: activation {raw.get('hidden_act')!r} is not supported (silu is)")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{name}: partial rope is not supported")


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to a raw config, with errors that name model and field."""

    raw: Mapping[str, object]
    name: str

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self.name}: config.json needs an integer {key}, has {value!r}")
        return value


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object, name: str, key: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"{name}: {key} must be a number, is {value!r}")
    return value


def _token_ids(value: object, name: str) -> tuple[int, ...]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise ModelError(f"{name}: token ids in config.json must be integers, are {value!r}")
    return tuple(values)
