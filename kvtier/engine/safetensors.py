"""Checkpoints as directories: ``config.json``, one or several ``.safetensors`` files, ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvtier.engine.tokenizer import TokenizerSource
from kvtier.errors import ModelError

_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file. Raises `ModelError` where it is missing or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object; download the model again")
    return value


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, sharded or not.

    Raises `ModelError` where there are none; ``.bin`` and ``.pt`` files are never opened.
    """
    index = directory / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(s, str) and Path(s).name == s for s in shards.values()):
            raise ModelError(f"{index} has no usable weight_map; download the model again")
        files = [directory / shard for shard in sorted(set(shards.values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickled = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern)]
        reason = (
            f"only pickled weights ({pickled[0]}), which are never loaded: convert them" if pickled else "no weights"
        )
        raise ModelError(f"{directory} has {reason}; a .safetensors or .gguf file is needed")
    if absent := [f.name for f in files if not f.exists()]:
        raise ModelError(f"{directory}: shard {absent[0]} is missing; download the model again")
    return files


def read_tensors(files: list[Path]) -> dict[str, torch.Tensor]:
    """Every tensor of ``files`` in its own dtype. Raises `ModelError` for a malformed file or an integer dtype."""
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():  # noqa: SIM118 - not a mapping
                    if not name.endswith("rotary_emb.inv_freq"):
                        tensors[name] = reader.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} is not a readable safetensors file ({error}); download the model again"
            ) from error
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ModelError(f"{name} has dtype {tensor.dtype}: quantised safetensors are not supported")
    return tensors


def tokenizer_source(directory: Path) -> TokenizerSource | None:
    """The tokenizer that the directory brings; None without ``tokenizer.json``."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    settings = read_json(directory / "tokenizer_config.json") if (directory / "tokenizer_config.json").exists() else {}
    template_file = directory / "chat_template.jinja"
    template = template_file.read_text(encoding="utf-8") if template_file.exists() else _template(settings)
    special = {
        key: token
        for key in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (token := _token_text(settings.get(key))) is not None
    }
    return TokenizerSource(path.read_text(encoding="utf-8"), chat_template=template, special=special)


def _template(settings: Mapping[str, object]) -> str | None:
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
