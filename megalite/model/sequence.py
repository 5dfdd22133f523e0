"""The order of a microbatch's tokens: masks, rotary tables, and place for dropout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megalite.config import Rotation
from megalite.model.cache import Cache
from megalite.model.dropout import DropoutAt

# The masks that are made, by document boundaries and window: a microbatch's, or those of several.
Masks = dict[tuple[tuple[int, ...], int | None], Any]


@dataclass(frozen=True)
class Sequences:
    """The part of a microbatch's input that all layers share.

    A layer reads the mask and the tables of its kind. masks: the pairs of tokens that attend, by
    window, in the kernels' form. tables: cosines and sines [s, R/2] by rotation; token t of the
    microbatch has position t mod s. dropout: the place of the microbatch in its step; None drops
    nothing. cache: has the keys and values of texts that grow; the tables then have a row for each
    token, s = T.
    """

    masks: Mapping[int | None, Any]
    tables: Mapping[Rotation, tuple[Tensor, Tensor]]
    dropout: DropoutAt | None = None
    cache: Cache | None = None
