"""Where a model runs, as far as a machine without a GPU can tell."""

from __future__ import annotations

import pytest
import torch

from kvtier.assembly.assemble import chosen_device
from kvtier.engine import attention
from kvtier.engine.architecture import random_tensors
from kvtier.engine.attention import Chunk
from kvtier.engine.device import Placement, place
from kvtier.engine.linear import Linear
from kvtier.engine.model import LlamaModel, StepBatch
from kvtier.errors import ConfigError

from .support import CONFIG

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "mps", "cuda0"])
def test_an_unknown_device_is_named_with_those_that_are_known(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device '{name}' is not supported by this engine; use auto, cpu, cuda"):
        chosen_device(name)


def test_a_gpu_that_torch_does_not_see_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"sees no GPUs; use cpu"):
        chosen_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"sees 2 GPUs"):
        chosen_device("cuda:2")


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen_device("auto") == chosen_device("cpu") == torch.device("cpu")


def test_arithmetic_follows_the_checkpoint_on_a_gpu_and_is_float32_on_a_cpu() -> None:
    def dtype(device: torch.device, own: str) -> torch.dtype:
        return place(device, "torch", own, torch.bfloat16).dtype

    assert [dtype(GPU, own) for own in ("bf16", "fp16", "fp32")] == [torch.bfloat16, torch.float16, torch.bfloat16]
    assert dtype(torch.device("cpu"), "bf16") is torch.float32
    assert place(torch.device("cpu"), "auto", "bf16", torch.bfloat16).backend is attention


def test_kernels_that_cannot_run_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="'triton' runs on a GPU; on a CPU it is torch"):
        place(torch.device("cpu"), "triton", "bf16", torch.bfloat16)


def test_products_of_16_bits_are_near_to_those_of_float32() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.empty(64, 96).normal_(generator=generator), torch.empty(5, 96).normal_(generator=generator)
    half = Linear(weight, torch.ones(64), torch.bfloat16)
    half.packed, half._weight = False, weight.bfloat16()  # as on a GPU: packing is for a CPU
    got = half(x)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, x @ weight.T + 1, atol=0.3, rtol=0.02)


class _Recorder:
    """A backend that says what it is asked, over torch's."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> object:
        self.asked.append(name)
        return getattr(attention, name)


def test_a_model_uses_the_backend_of_its_placement() -> None:
    recorder = _Recorder()
    tensors = random_tensors(CONFIG, 3)
    model = LlamaModel(CONFIG, tensors, Placement(backend=recorder))  # type: ignore[arg-type]  # asked by name
    plain = LlamaModel(CONFIG, tensors)
    batch = StepBatch((Chunk(range(20), 0, [2, 0]),))
    logits = [each.forward(batch, each.allocate_kv(3, 16, "bf16")) for each in (model, plain)]
    assert torch.equal(*logits)
    # The last layer has a plan of its own: only the wanted row goes on from there.
    assert recorder.asked == ["plan", "plan", *["write", "attend"] * CONFIG.layers]
