"""Where a model runs: its device, its arithmetic there, and the kernels of its attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import cast

import torch

from kvtier.engine import attention
from kvtier.engine.attention import AttentionBackend
from kvtier.errors import ConfigError

_KERNELS = {
    "triton": "kvtier.engine.paged_attention_triton",
    "flashinfer": "kvtier.engine.paged_attention_flashinfer",
}
"""Modules of kernels that run on a GPU only, by the package that each needs."""
_CPU = torch.device("cpu")
_TORCH = cast("AttentionBackend", attention)
_PACKAGES = {"triton": "triton", "flashinfer": "flashinfer-python"}
"""What pip calls what each of them needs."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A device and what is computed on it in what way. By default: torch on the CPU, in float32."""

    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    """What factors of matrix products are rounded to. Between products everything is float32, and so are sums."""
    backend: AttentionBackend = _TORCH

    def moved(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """``tensors`` on this device, each as it is asked for: never all of them twice."""
        return tensors if self.device.type == "cpu" else _Moved(tensors, self.device)


class _Moved(Mapping[str, torch.Tensor]):
    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._tensors, self._device = tensors, device

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name].to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def place(device: torch.device, kernels: str, dtype: str, kv_dtype: torch.dtype) -> Placement:
    """The placement on ``device`` with attention ``kernels`` (``auto``, ``torch``, ``triton`` or ``flashinfer``).

    ``dtype`` is the checkpoint's own; on a GPU products are made in it where it has 16 bits, else in bf16. Raises
    ``ConfigError`` for kernels that the device, the installation or ``kv_dtype`` does not allow.
    """
    on_gpu = device.type == "cuda"
    if kernels == "auto":
        kernels = "triton" if on_gpu and find_spec("triton") is not None else "torch"
    if kernels == "torch":
        backend = attention
    elif not on_gpu:
        raise ConfigError(f"attention {kernels!r} runs on a GPU; on a CPU it is torch")
    elif find_spec(kernels) is None:
        raise ConfigError(
            f"attention {kernels!r} needs a package that is not installed; run: pip install {_PACKAGES[kernels]}"
        )
    elif kernels == "flashinfer" and kv_dtype is torch.float32:
        raise ConfigError(
            "attention 'flashinfer' takes no fp32 keys and values; choose kv_dtype bf16 or fp16, or triton"
        )
    else:
        backend = import_module(_KERNELS[kernels])
    arithmetic = torch.float32 if not on_gpu else torch.float16 if dtype == "fp16" else torch.bfloat16
    return Placement(device, arithmetic, cast("AttentionBackend", backend))
