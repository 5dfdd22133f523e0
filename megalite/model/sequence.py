"""The order of a microbatch's tokens: mask, rotary tables, and place for dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megalite.model.cache import Cache
from megalite.model.dropout import DropoutAt

# The masks that are made, by document boundaries and window: a microbatch's, or those of several.
Masks = dict[tuple[tuple[int, ...], int | None], Any]


@dataclass(frozen=True)
class Sequences:
    """The part of a microbatch's input that all layers share.

    mask: the pairs of tokens that attend, in the kernels' form. cos_sh, sin_sh: rotary tables
    [s, R/2]; token t of the microbatch has position t mod s. dropout: the place of the microbatch
    in its step; None drops nothing. cache: has the keys and values of texts that grow; the tables
    then have a row for each token, s = T.
    """

    mask: Any
    cos_sh: Tensor
    sin_sh: Tensor
    dropout: DropoutAt | None = None
    cache: Cache | None = None
