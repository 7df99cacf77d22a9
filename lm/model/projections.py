"""The projections of x and of sh(y) that a token is made from: one product serves them all.

Shape suffixes: b batch, l length, d channels (d_inner), m columns.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .state import once


class Projection(NamedTuple):
    """One linear map of what a block reads."""

    name: str
    from_x: torch.Tensor  # (b,l,m) what x gives, bias included
    of_y: torch.Tensor | None  # (m,d) the matrix that sh(y) is multiplied by; None: it is not read


class Projections(NamedTuple):
    """All projections of a solve, side by side; those that read sh(y) come first."""

    raw: torch.Tensor  # (b,l,m) the x part of all
    columns: dict[str, slice]  # where each lies in raw
    weight_y: torch.Tensor  # (k,d) what the first k columns of raw get from sh(y)

    def rows(self, y_before: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each projection by name, (b,l,·). y_before: (b,l,d) sh(y)."""
        k = self.weight_y.shape[0]
        read: Any = None
        if k:
            read = F.linear(y_before.to(self.weight_y.dtype), self.weight_y)
            read = self.raw[..., :k] + read.to(self.raw.dtype)
        return {
            name: self.raw[..., at] if at.start >= k else read[..., at]
            for name, at in self.columns.items()
        }

    def moved(self, noise: torch.Tensor | None) -> "Projections":
        """As if `noise` (b,l,d) were added to sh(y) wherever it is read; None: none."""
        k = self.weight_y.shape[0]
        if noise is None or not k:
            return self
        read = F.linear(noise.to(self.weight_y.dtype), self.weight_y).to(self.raw.dtype)
        return self._replace(raw=self.raw + F.pad(read, (0, self.raw.shape[-1] - k)))

    def cut(self, start: int, end: int) -> "Projections":
        """Of the tokens start ≤ t < end."""
        return self._replace(raw=self.raw[:, start:end])


def side_by_side(
    projections: Iterable[Projection], like: torch.Tensor, kept: Any = None
) -> Projections:
    """Projections, made of a list of Projection.

    Args:
        like: (b,l,d) what the mixer mixes: its dtype is that of raw.
        kept: a state.WeightCache for the joined maps, or None.
    """
    ordered = sorted(projections, key=lambda projection: projection.of_y is None)
    raw = torch.cat([projection.from_x.to(like.dtype) for projection in ordered], -1)
    columns, start = {}, 0
    for projection in ordered:
        end = start + projection.from_x.shape[-1]
        columns[projection.name] = slice(start, end)
        start = end
    maps = [projection.of_y for projection in ordered if projection.of_y is not None]
    if not maps:
        return Projections(raw, columns, raw.new_zeros(0, like.shape[-1]))
    return Projections(raw, columns, once(kept, "weight_y", lambda: torch.cat(maps)))
