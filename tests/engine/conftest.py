"""What several engine tests share: the real model, loaded once."""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data.topics import topics

import pytest
import torch

from kvtier.engine.checkpoint import Checkpoint, open_checkpoint
from kvtier.engine.exactness import settle
from kvtier.engine.model import LlamaModel
from kvtier.engine.tokenizer import Tokenizer
from kvtier.errors import ModelError
from kvtier.testing.requirements import require_installed


@dataclass(frozen=True)
class RealModel:
    """SmolLM2-135M-Instruct."""

    checkpoint: Checkpoint
    tensors: dict[str, torch.Tensor]
    model: LlamaModel
    tokenizer: Tokenizer
    exact: bool
    """Whether the start-up self-test found bit-equality within reach on this machine."""


@pytest.fixture(scope="session")
def smollm2() -> RealModel:
    try:
        checkpoint = open_checkpoint("smollm2")
    except ModelError as error:
        require_installed(False, str(error))
        raise
    tensors = checkpoint.tensors()
    model = LlamaModel(checkpoint.config, tensors)
    return RealModel(checkpoint, tensors, model, checkpoint.tokenizer(), settle(model, "bf16", 16))


@pytest.fixture(scope="session")
def prose() -> str:
    """Real English technical prose of more than 20,000 tokens: the topics of Python's own ``help``."""
    return "\n\n".join(text for _, text in sorted(topics.items()))
