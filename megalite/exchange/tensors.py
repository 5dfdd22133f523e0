"""The places of another framework's tensors in ours, by a table of names.

A tensor of ours is assembled of views of theirs: rows of a stored tensor, transposed where the
class keeps inputs first, reshaped to a box of our global tensor. Pure arithmetic and names; the
same parts read a folder and write one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megalite.config import ModelConfig
from megalite.layout.rectangles import Rectangle
from megalite.layout.sharding import ShardSpec
from megalite.run.parameters import stage_parameters, whole_model


@dataclass(frozen=True)
class Stacked:
    """One tensor in which the parts of a packed tensor of ours follow one another."""

    name: str


# Theirs for a module of ours: one tensor, packed as ours is where ours is packed; a tensor for each
# part (query, key, value; gate, up); or the parts in a row.
Theirs = str | tuple[str, ...] | Stacked


@dataclass(frozen=True)
class Names:
    """A table of tensor names: our modules -> theirs, without ".weight" and ".bias".

    A name that ends with "_" is followed by "weight" or "bias" without the dot.
    `layer` is below `prefix`, where `{}` is the number of the layer. `inputs_first`: the modules
    whose weights are kept as [inputs, outputs]. `base`: what names begin with, except in a folder
    of the model without its head. `ignored`: patterns of names that hold no parameter. `padded`:
    embedding and head have rows that pad the vocabulary.
    """

    outside: Mapping[str, Theirs]
    prefix: str
    layer: Mapping[str, Theirs]
    inputs_first: frozenset[str] = frozenset()
    base: str = ""
    ignored: tuple[str, ...] = ()
    padded: bool = False


@dataclass(frozen=True)
class Part:
    """The rows [start, stop) of their tensor `name`, which fill a box of one of ours.

    `shape` is that of their whole tensor as it is stored. Rows count along its outputs: the first
    dim, or the last one of a tensor with inputs first.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    inputs_first: bool
    box: Rectangle
    padded: bool = False  # the rows from `stop` on pad a vocabulary

    def view(self, theirs: Any) -> Any:
        """The part as a view of their tensor, of the box's sizes."""
        rows = theirs.t() if self.inputs_first else theirs
        return rows[self.start : self.stop].view(self.box.sizes)


def parts_of(model: ModelConfig, names: Names) -> tuple[dict[str, list[Part]], list[str]]:
    """Our tensors by name with the parts that fill them, and those without a place in `names`.

    Of a vocabulary's table only the true rows are filled.
    """
    specs = {spec.name: spec for spec in stage_parameters(model, whole_model(model))}
    found: dict[str, list[Part]] = {}
    for module, theirs, inputs_first in _modules(model, names):
        weight = specs.get(f"{module}.weight")
        for kind in ("weight", "bias"):
            spec = specs.get(f"{module}.{kind}")
            if spec is not None:
                assert weight is not None, f"{spec.name} has no weight"
                found[spec.name] = list(
                    _parts(spec, weight, kind, theirs, inputs_first, names.padded)
                )
    return found, [name for name in specs if name not in found]


def _modules(model: ModelConfig, names: Names) -> Iterator[tuple[str, Theirs, bool]]:
    """Our modules, with theirs under whole names, and whether those have inputs first."""
    for module, theirs in names.outside.items():
        yield module, theirs, module in names.inputs_first
    for layer in range(model.num_layers):
        prefix = names.prefix.format(layer)
        for module, theirs in names.layer.items():
            yield (
                f"layers.{layer}.{module}",
                _below(prefix, theirs),
                module in names.inputs_first,
            )


def _below(prefix: str, theirs: Theirs) -> Theirs:
    if isinstance(theirs, Stacked):
        return Stacked(f"{prefix}{theirs.name}")
    if isinstance(theirs, tuple):
        return tuple(f"{prefix}{name}" for name in theirs)
    return f"{prefix}{theirs}"


def _parts(
    spec: ShardSpec,
    weight: ShardSpec,
    kind: str,
    theirs: Theirs,
    inputs_first: bool,
    padded: bool,
) -> Iterator[Part]:
    """The parts of one of our tensors."""
    # All dims but a matrix's last, its inputs, are outputs; a vector has outputs alone.
    is_vector = kind == "bias" or spec.role == "norm"
    inputs = () if is_vector else spec.shape[-1:]
    transposed = inputs_first and not is_vector

    boxes = _boxes(spec, weight, theirs)
    rows = [math.prod(box.sizes) // math.prod(inputs) for box in boxes]
    start = 0
    for index, (box, num_rows) in enumerate(zip(boxes, rows, strict=True)):
        if isinstance(theirs, tuple):
            name, start, outputs = theirs[index], 0, num_rows
        else:
            name, outputs = theirs.name if isinstance(theirs, Stacked) else theirs, sum(rows)
        has_padding = padded and spec.num_true_rows is not None
        outputs = spec.shape[0] if has_padding else outputs
        shape = (*inputs, outputs) if transposed else (outputs, *inputs)
        full = f"{name}{'' if name.endswith('_') else '.'}{kind}"
        yield Part(full, shape, start, start + num_rows, transposed, box, has_padding)
        start += num_rows


def _boxes(spec: ShardSpec, weight: ShardSpec, theirs: Theirs) -> list[Rectangle]:
    """The boxes of our tensor that theirs fill, in their order."""
    zeros = (0,) * len(spec.shape)
    if isinstance(theirs, str):
        rows = spec.shape[0] if spec.num_true_rows is None else spec.num_true_rows
        return [Rectangle(zeros, (rows, *spec.shape[1:]))]

    # A bias is packed as its weight, which has the sizes of the parts.
    packing = weight.matrices
    assert packing is not None, f"{spec.name} is not packed"
    boxes, first = [], 0
    for size in packing.sizes:
        offsets, sizes = list(zeros), list(spec.shape)
        offsets[packing.dim], sizes[packing.dim] = first, size
        boxes.append(Rectangle(tuple(offsets), tuple(sizes)))
        first += size
    return boxes
