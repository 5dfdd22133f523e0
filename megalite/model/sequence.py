"""What the layers of a microbatch need to know of its tokens' order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megalite.model.dropout import DropoutAt


@dataclass(frozen=True)
class Sequences:
    """mask: which tokens see which, as the kernels take it.

    cos_sh, sin_sh: rotary tables [s, R/2]; token t of the microbatch has position t mod s.
    dropout: where the microbatch stands in its step; None drops nothing.
    """

    mask: Any
    cos_sh: Tensor
    sin_sh: Tensor
    dropout: DropoutAt | None = None
