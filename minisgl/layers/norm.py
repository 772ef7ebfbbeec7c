"""Root-mean-square normalization (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch

from minisgl.kernel import fused_add_rmsnorm, rmsnorm, rmsnorm_inplace

from .base import BaseOP

__all__ = ["RMSNorm", "RMSNormFused"]


class RMSNorm(BaseOP):
    """Normalizes the last dimension of `[..., size]`."""

    def __init__(self, size: int, eps: float) -> None:
        self.eps = eps
        self.weight = torch.empty(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor like `x [..., size]`."""
        return rmsnorm(x, self.weight, self.eps)

    def forward_inplace(self, x: torch.Tensor) -> None:
        """Normalize `x [..., size]` where it lies (the heads of a merged projection)."""
        rmsnorm_inplace(x, self.weight, self.eps)


class RMSNormFused(RMSNorm):
    """Adds to the residual stream and normalizes it."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(norm(residual + x), residual + x)`, both `[T, size]`.

        Without a residual, `x` is the residual. With one, both arguments are overwritten by
        the results.
        """
        if residual is None:
            return rmsnorm(x, self.weight, self.eps), x
        fused_add_rmsnorm(x, residual, self.weight, self.eps)
        return x, residual
