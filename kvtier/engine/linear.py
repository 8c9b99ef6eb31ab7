"""A matrix product whose rows do not depend on how many there are.

``F.linear`` picks other kernels for a few rows than for many, and so other roundings. oneDNN's packed form, made for 16 rows
and given at least `LEAST_ROWS`, gives every row the same bits at any count, and is faster. Where torch has no oneDNN,
``F.linear`` it is, and the start-up self-test says that the engine is not exact.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

LEAST_ROWS = 4
"""Fewer rows take another kernel: one row alone may be summed in another order (seen with AVX-512 at 1,536 inputs), and up
to two take half as long again as four (SmolLM2's layers on two AVX-512 cores: 18 ms against 12.5)."""

_PACKED_FOR = 16


class Linear:
    """``y = x W^T + b`` for a fixed weight ``[out, in]``, which is packed and not kept, and a bias ``[out]``."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        """``dtype`` is what weight and inputs are rounded to; on a CPU float32."""
        available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch's own gap
        self.packed = available and weight.device.type == "cpu"
        weight = weight.to(dtype).contiguous()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR) if self.packed else weight
        self._bias = None if bias is None else bias.to(dtype).contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` is float32 ``[rows, in]``; gives ``[rows, out]``."""
        if not self.packed:
            return F.linear(x.to(self._weight.dtype), self._weight, self._bias).float()
        count = len(x)
        rows = torch.cat((x, x[-1:].expand(LEAST_ROWS - count, -1))) if count < LEAST_ROWS else x.contiguous()
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return y[:count]
