"""Rotary position embedding in the two-halves form of Hugging Face Llama."""

from __future__ import annotations

import torch

from kvtier.engine.architecture import ModelConfig


class RopeTable:
    """Cosines and sines by position, made on demand and kept."""

    def __init__(self, config: ModelConfig) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        self._frequencies = 1.0 / (config.rope_theta**exponents)
        if config.rope_divisors is not None:
            self._frequencies /= torch.tensor(config.rope_divisors)
        self._table = torch.empty(0, 2, config.head_dim)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `rotate` wants for ``positions`` ``[tokens]``: two tensors ``[tokens, 1, head_dim]``.

        Cosines for both halves of a head, and sines, those of the first half negative.
        """
        if positions.numel() and (top := int(positions.max()) + 1) > len(self._table):
            size = 1 << (top - 1).bit_length()
            angles = torch.outer(torch.arange(size, dtype=torch.float32), self._frequencies)
            cos, sin = angles.cos(), angles.sin()
            self._table = torch.stack((torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)), dim=1)
        picked = self._table.index_select(0, positions)
        return picked[:, :1], picked[:, 1:]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` ``[tokens, heads, head_dim]`` turned by its positions' angles; cosines and sines as `RopeTable.rows` gives them."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos).add_(torch.cat((second, first), dim=-1).mul_(sin))
