"""What the layers of a microbatch need to know of its tokens' order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megalite.model.dropout import DropoutAt


@dataclass(frozen=True)
class Sequences:
    """cu_seqlens: document boundaries [0, ..., T] of the microbatch's flattened tokens.

    cos_sh, sin_sh: rotary tables [s, R/2]; token t of the microbatch has position t mod s.
    dropout: where the microbatch stands in its step; None drops nothing.
    """

    cu_seqlens: Sequence[int]
    cos_sh: Tensor
    sin_sh: Tensor
    dropout: DropoutAt | None = None
