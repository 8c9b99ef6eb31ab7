"""Shapes of known models, numbers of known GPUs and links, each with its source; any other model by its ``config.json``.

Table and files go through one reader, which counts a model's weights from its shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.errors import ConfigError, ModelError
from kvtier.layout import DTYPE_BYTES, CacheGroup, GroupKind
from kvtier.params import nearest
from kvtier.sim.planner import Gpu, Link, ModelShape

Config = Mapping[str, object]
MOST_CONFIG_BYTES = 8 << 20

# name, repository on huggingface.co (whose config.json is the source), type, layers, hidden, heads, KV heads, head dimension,
# intermediate, vocabulary, positions, tied embeddings
_DENSE = (
    ("llama-2-7b", "meta-llama/Llama-2-7b-hf", "llama", 32, 4096, 32, 32, 128, 11008, 32000, 4096, False),
    ("llama-2-13b", "meta-llama/Llama-2-13b-hf", "llama", 40, 5120, 40, 40, 128, 13824, 32000, 4096, False),
    ("llama-2-70b", "meta-llama/Llama-2-70b-hf", "llama", 80, 8192, 64, 8, 128, 28672, 32000, 4096, False),
    ("llama-3-8b", "meta-llama/Meta-Llama-3-8B", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192, False),
    ("llama-3-70b", "meta-llama/Meta-Llama-3-70B", "llama", 80, 8192, 64, 8, 128, 28672, 128256, 8192, False),
    ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072, False),
    ("llama-3.1-70b", "meta-llama/Llama-3.1-70B", "llama", 80, 8192, 64, 8, 128, 28672, 128256, 131072, False),
    ("llama-3.1-405b", "meta-llama/Llama-3.1-405B", "llama", 126, 16384, 128, 8, 128, 53248, 128256, 131072, False),
    ("llama-3.2-1b", "meta-llama/Llama-3.2-1B", "llama", 16, 2048, 32, 8, 64, 8192, 128256, 131072, True),
    ("llama-3.2-3b", "meta-llama/Llama-3.2-3B", "llama", 28, 3072, 24, 8, 128, 8192, 128256, 131072, True),
    ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", "llama", 80, 8192, 64, 8, 128, 28672, 128256, 131072, False),
    ("mistral-7b", "mistralai/Mistral-7B-v0.3", "mistral", 32, 4096, 32, 8, 128, 14336, 32768, 32768, False),
    ("qwen2-7b", "Qwen/Qwen2-7B", "qwen2", 28, 3584, 28, 4, 128, 18944, 152064, 131072, False),
    ("qwen2-72b", "Qwen/Qwen2-72B", "qwen2", 80, 8192, 64, 8, 128, 29568, 152064, 131072, False),
    ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", "qwen2", 24, 896, 14, 2, 64, 4864, 151936, 32768, True),
    ("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B", "qwen2", 28, 1536, 12, 2, 128, 8960, 151936, 131072, True),
    ("qwen2.5-7b", "Qwen/Qwen2.5-7B", "qwen2", 28, 3584, 28, 4, 128, 18944, 152064, 131072, False),
    ("qwen2.5-14b", "Qwen/Qwen2.5-14B", "qwen2", 48, 5120, 40, 8, 128, 13824, 152064, 131072, False),
    ("qwen2.5-32b", "Qwen/Qwen2.5-32B", "qwen2", 64, 5120, 40, 8, 128, 27648, 152064, 131072, False),
    ("qwen2.5-72b", "Qwen/Qwen2.5-72B", "qwen2", 80, 8192, 64, 8, 128, 29568, 152064, 131072, False),
    ("qwen3-0.6b", "Qwen/Qwen3-0.6B", "qwen3", 28, 1024, 16, 8, 128, 3072, 151936, 40960, True),
    ("qwen3-4b", "Qwen/Qwen3-4B", "qwen3", 36, 2560, 32, 8, 128, 9728, 151936, 40960, True),
    ("qwen3-8b", "Qwen/Qwen3-8B", "qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 40960, False),
    ("qwen3-14b", "Qwen/Qwen3-14B", "qwen3", 40, 5120, 40, 8, 128, 17408, 151936, 40960, False),
    ("qwen3-32b", "Qwen/Qwen3-32B", "qwen3", 64, 5120, 64, 8, 128, 25600, 151936, 40960, False),
    ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M", "llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, True),
    ("smollm2-360m", "HuggingFaceTB/SmolLM2-360M", "llama", 32, 960, 15, 5, 64, 2560, 49152, 8192, True),
    ("smollm2-1.7b", "HuggingFaceTB/SmolLM2-1.7B", "llama", 24, 2048, 32, 32, 64, 8192, 49152, 8192, True),
)
_COLUMNS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)

_OTHERS: dict[str, tuple[str, Config]] = {
    "falcon-7b": (
        "tiiuae/falcon-7b",
        {
            "model_type": "falcon",
            "num_hidden_layers": 32,
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "multi_query": True,
            "vocab_size": 65024,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral-8x7b": (
        "mistralai/Mixtral-8x7B-v0.1",
        {
            "model_type": "mixtral",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,
        },
    ),
    "qwen3-30b-a3b": (
        "Qwen/Qwen3-30B-A3B",
        {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
        },
    ),
    "qwen3-235b-a22b": (
        "Qwen/Qwen3-235B-A22B",
        {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 94,
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
        },
    ),
    "deepseek-v3": (
        "deepseek-ai/DeepSeek-V3",
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "vocab_size": 129280,
            "max_position_embeddings": 163840,
            "quantization_config": {"quant_method": "fp8"},
        },
    ),
}

MODELS: dict[str, tuple[str, Config]] = {
    **{name: (hub, dict(zip(_COLUMNS, row, strict=True))) for name, hub, *row in _DENSE},
    **_OTHERS,
}
"""Name -> (repository on huggingface.co whose ``config.json`` is the source, the part of that file that matters here)."""

_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
GPUS = {
    each.name: each
    for each in (
        # peak dense bf16, HBM, HBM/s, PCIe and NVLink in one direction, assumed USD an hour (rented, 2026, rounded)
        Gpu("a100", 312e12, 80e9, 2.039e12, 32e9, 300e9, 1.8, f"{_NVIDIA}a100 (80 GB SXM; PCIe 4.0)"),
        Gpu("h100", 989.4e12, 80e9, 3.35e12, 64e9, 450e9, 3.0, f"{_NVIDIA}h100 (SXM; half of the sparse figure)"),
        Gpu("h200", 989.4e12, 141e9, 4.8e12, 64e9, 450e9, 3.8, f"{_NVIDIA}h200 (SXM; half of the sparse figure)"),
        Gpu("h20", 148e12, 96e9, 4.0e12, 64e9, 450e9, 1.6, "NVIDIA H20 data sheet"),
        Gpu("b200", 2250e12, 180e9, 8.0e12, 64e9, 900e9, 5.5, f"{_NVIDIA}hgx (HGX B200; half of the sparse figure)"),
        Gpu("l40s", 362e12, 48e9, 0.864e12, 32e9, None, 1.0, f"{_NVIDIA}l40s (half of the sparse figure)"),
        Gpu("l4", 121e12, 24e9, 0.3e12, 32e9, None, 0.7, f"{_NVIDIA}l4 (half of the sparse figure)"),
        Gpu("a10g", 70e12, 24e9, 0.6e12, 32e9, None, 1.0, "NVIDIA A10G, as AWS's g5 instances have it"),
        Gpu("mi300x", 1307.4e12, 192e9, 5.3e12, 64e9, 448e9, 3.0, "AMD Instinct MI300X data sheet (Infinity Fabric)"),
        Gpu(
            "rtx-4090", 165.2e12, 24e9, 1.008e12, 32e9, None, 0.4,
            "NVIDIA Ada GPU architecture white paper, appendix A (fp32 accumulation)",
        ),
    )
}  # fmt: skip
"""By name. Prices are assumptions: give your own. Of H100, H200 and B200 https://glennklockwood.com/garden/processors has the
same figures, from NVIDIA's papers; it counts both directions of a link."""

LINKS = {
    each.name: each
    for each in (
        Link("400gb", 50e9, 5e-6, "400 Gb/s InfiniBand NDR or Ethernet"),
        Link("nvme", 6.5e9, 1e-4, "assumed: one PCIe 4.0 x4 drive, sequential reads as data sheets have them"),
        Link("redis", 3.1e9, 5e-4, "assumed: 25 Gb/s Ethernet to one server"),
    )
}
"""Ways for blocks that are no part of a GPU. Speeds are assumptions: give your own."""


def model_shape(name: str, kv_dtype: str = "bf16") -> ModelShape:
    """The shape of a model of the table, or of a ``config.json`` (its path, or its folder's).

    Raises ``ConfigError`` naming the nearest model of the table, or what the file lacks.
    """
    if kv_dtype not in DTYPE_BYTES:
        raise ConfigError(f"KV dtype {kv_dtype!r} is not known{nearest(kv_dtype, DTYPE_BYTES)}")
    known = MODELS.get(name.casefold())
    if known is not None:
        shape = shape_of(name.casefold(), known[1], kv_dtype)
        return replace(shape, source=f"https://huggingface.co/{known[0]}/blob/main/config.json")
    path = Path(name).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.suffix != ".json":
        raise ConfigError(f"model {name!r} is not in the table, and no config.json{nearest(name, MODELS)}")
    return replace(shape_of(_title(path), _read(path), kv_dtype), source=str(path))


def gpu(name: str) -> Gpu:
    """A GPU of the table. Raises ``ConfigError`` naming the nearest."""
    found = GPUS.get(name.casefold())
    if found is None:
        raise ConfigError(f"GPU {name!r} is not known{nearest(name, GPUS)}")
    return found


def _title(path: Path) -> str:
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def _read(path: Path) -> Config:
    try:
        with path.open("rb") as file:
            text = file.read(MOST_CONFIG_BYTES + 1)
    except OSError as failed:
        raise ConfigError(f"{path}: cannot read the model's config: {failed.strerror}") from None
    if len(text) > MOST_CONFIG_BYTES:
        raise ConfigError(f"{path}: more than {MOST_CONFIG_BYTES >> 20} MiB are no model's config")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as wrong:
        raise ConfigError(f"{path}: not JSON: {wrong}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a model's config is a JSON object")
    inner = raw.get("text_config")
    return inner if isinstance(inner, dict) else raw


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to a config, with errors that name model and field."""

    raw: Config
    name: str

    def integer(self, *keys: str, default: int | None = None, least: int = 0) -> int:
        """The first of ``keys`` that is there."""
        for key in keys:
            value = self.raw.get(key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 40:
                shown = repr(value) if len(repr(value)) <= 40 else repr(value)[:37] + "..."
                raise ModelError(f"{self.name}: {key} must be a whole number from {least}, is {shown}")
            return value
        if default is None:
            raise ModelError(f"{self.name}: config.json has no {keys[0]}")
        return default

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.raw.get(key)
        return default if value is None else bool(value)


def shape_of(name: str, raw: Config, kv_dtype: str) -> ModelShape:
    """What a ``config.json`` says. Raises ``ModelError`` naming what is missing or wrong.

    Weights are counted as gated or plain MLPs, routed experts and attention have them; biases and norms as far as the
    families of the table have them.
    """
    fields = _Fields(raw, name)
    layers = fields.integer("num_hidden_layers", "n_layer", least=1)
    hidden = fields.integer("hidden_size", "n_embd", least=1)
    heads = fields.integer("num_attention_heads", "n_head", least=1)
    qwen3 = str(raw.get("model_type")).startswith("qwen3")
    head_dim = fields.integer("head_dim", default=128 if qwen3 else hidden // heads, least=1)
    if raw.get("head_dim") is None and not qwen3 and not fields.integer("kv_lora_rank", default=0) and hidden % heads:
        raise ModelError(f"{name}: a hidden size of {hidden} is no whole number of {heads} heads")
    mla = fields.integer("kv_lora_rank", default=0)
    try:
        groups = _mla_groups(fields, layers, kv_dtype) if mla else _groups(fields, layers, heads, head_dim, kv_dtype)
    except ValueError as wrong:
        raise ModelError(f"{name}: {wrong}") from None
    qk_dim = fields.integer("qk_nope_head_dim") + fields.integer("qk_rope_head_dim") if mla else head_dim
    v_dim = fields.integer("v_head_dim") if mla else head_dim
    vocab = fields.integer("vocab_size", least=1)
    embedding = vocab * hidden
    attention = _mla_weights(fields, hidden, heads) if mla else _attention_weights(fields, groups[0], hidden, heads)
    experts = fields.integer("n_routed_experts", "num_local_experts", "num_experts", default=0)
    routed_to = fields.integer("num_experts_per_tok") if experts else 0
    if experts and not 0 < routed_to <= experts:
        raise ModelError(f"{name}: {routed_to} of {experts} experts per token")
    dense = fields.integer("first_k_dense_replace", default=0) if experts else layers
    if dense > layers:
        raise ModelError(f"{name}: first_k_dense_replace is {dense}, of {layers} layers")
    fixed = layers * (attention + 2 * hidden) + hidden + embedding * (1 if _tied(fields) else 2)
    fixed += dense * _mlp(fields, hidden)
    each = 0
    if experts:
        each = 3 * hidden * fields.integer("moe_intermediate_size", "intermediate_size", least=1)
        shared = fields.integer("n_shared_experts", default=0)
        fixed += (layers - dense) * (shared * each + experts * hidden)
    routed = (layers - dense) * each
    return ModelShape(
        name=name,
        groups=groups,
        parameters=fixed + experts * routed,
        active=fixed + routed_to * routed,
        heads=heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        max_positions=fields.integer("max_position_embeddings", "n_positions", default=2048, least=1),
        vocab=vocab,
        experts=experts,
        experts_per_token=routed_to,
        weight_bytes_each=1.0 if _is_fp8(raw) else 2.0,
    )


def _tied(fields: _Fields) -> bool:
    return fields.flag("tie_word_embeddings", default=fields.raw.get("model_type") == "falcon")


def _is_fp8(raw: Config) -> bool:
    quantised = raw.get("quantization_config")
    return isinstance(quantised, Mapping) and str(quantised.get("quant_method")).startswith("fp8")


def _mla_groups(fields: _Fields, layers: int, kv_dtype: str) -> tuple[CacheGroup, ...]:
    latent = fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim")
    return (CacheGroup(GroupKind.MLA, layers, 1, latent, kv_dtype),)


def _groups(fields: _Fields, layers: int, heads: int, head_dim: int, kv_dtype: str) -> tuple[CacheGroup, ...]:
    """Layers of full attention and layers with a window."""
    kv_heads = fields.integer("num_key_value_heads", "num_kv_heads", default=heads, least=1)
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        kv_heads = 1
    if heads % kv_heads:
        raise ModelError(f"{fields.name}: {heads} heads do not share {kv_heads} KV heads evenly")
    kind = GroupKind.MHA if kv_heads == heads else GroupKind.MQA if kv_heads == 1 else GroupKind.GQA
    group = CacheGroup(kind, layers, kv_heads, head_dim, kv_dtype)
    window = fields.integer("sliding_window", default=0)
    if not window or not fields.flag("use_sliding_window", default=True):
        return (group,)
    kinds = fields.raw.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise ModelError(f"{fields.name}: layer_types must say of each of {layers} layers what it attends to")
    full = [each for each in kinds or () if each == "full_attention"]
    parts = (replace(group, layers=n, window=w) for n, w in ((len(full), None), (layers - len(full), window)) if n)
    return tuple(parts)


def _attention_weights(fields: _Fields, group: CacheGroup, hidden: int, heads: int) -> int:
    queries, keys = heads * group.head_dim, group.kv_heads * group.head_dim
    weights = 2 * hidden * queries + 2 * hidden * keys
    kind = str(fields.raw.get("model_type"))
    if kind == "qwen2":
        weights += queries + 2 * keys
    if kind.startswith("qwen3"):
        weights += 2 * group.head_dim
    return weights


def _mla_weights(fields: _Fields, hidden: int, heads: int) -> int:
    """Down and up projections of queries and of the latent, and the output (DeepSeek-AI, "DeepSeek-V2", 2024)."""
    latent, rope, nope = (fields.integer(key) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
    value, low = fields.integer("v_head_dim"), fields.integer("q_lora_rank", default=0)
    queries = heads * (nope + rope)
    into_queries = hidden * low + low + low * queries if low else hidden * queries
    return into_queries + hidden * (latent + rope) + latent + latent * heads * (nope + value) + heads * value * hidden


def _mlp(fields: _Fields, hidden: int) -> int:
    if fields.raw.get("model_type") == "falcon":
        return 2 * hidden * fields.integer("ffn_hidden_size", default=4 * hidden)
    return 3 * hidden * fields.integer("intermediate_size", "n_inner", default=4 * hidden, least=1)
