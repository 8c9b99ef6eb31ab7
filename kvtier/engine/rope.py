"""Rotary position embedding, on heads whose dimensions lie pair by pair.

Hugging Face turns dimension ``i`` of a head with dimension ``i + head_dim / 2``. Here the two are neighbours, so that a pair is
one complex number and turning it one product: a quarter of the time. `paired` brings the rows of a projection into that order,
queries and keys alike, so their products are the same; K at rest keeps it, which `FORMAT` says in the identity.
"""

from __future__ import annotations

import torch

from kvtier.engine.architecture import ModelConfig

FORMAT = "rope-pairs"
"""The engine format of an identity: how K lies inside a block."""


class RopeTable:
    """Unit complex numbers by position, made on demand and kept."""

    def __init__(self, config: ModelConfig) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        self._frequencies = 1.0 / (config.rope_theta**exponents)
        if config.rope_divisors is not None:
            self._frequencies /= torch.tensor(config.rope_divisors)
        self._table = torch.empty(0, len(exponents), dtype=torch.complex64)

    def rows(self, positions: torch.Tensor) -> torch.Tensor:
        """What `rotate` wants for ``positions`` ``[tokens]``: complex ``[tokens, 1, head_dim / 2]``."""
        if positions.numel() and (top := int(positions.max()) + 1) > len(self._table):
            size = 1 << (top - 1).bit_length()
            angles = torch.outer(torch.arange(size, dtype=torch.float32), self._frequencies)
            self._table = torch.complex(angles.cos(), angles.sin())
        return self._table.index_select(0, positions).unsqueeze(1)


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """``x`` ``[tokens, heads, head_dim]``, its dimensions pair by pair, turned by its positions' `RopeTable.rows`."""
    return torch.view_as_real(torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)) * turns).flatten(-2)


def paired(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """``rows`` ``[heads * head_dim, ...]`` of a projection, those of each head from two halves to pairs."""
    return rows.view(-1, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
