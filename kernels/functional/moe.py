"""Rows of experts and their products; shapes as in `plain.moe`.

The gradient of permute is unpermute, and the reverse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.kernels.arguments import rows_readable
from megalite.kernels.functional.checks import FLOATS, INDEX, PARAMETER, Arg, check
from megalite.kernels.functional.operator import Operator, new, new_stats, operator
from megalite.kernels.operations import Kernels
from megalite.kernels.plain.moe import RowMap

_INT32 = (torch.int32,)


def _map_args(operation: str, rows: RowMap) -> dict[str, Arg]:
    """The arguments of a map for `check`. Raises TypeError for anything else."""
    if not isinstance(rows, RowMap):
        raise TypeError(
            f"{operation}: rows is a {type(rows).__name__}, expected what expert_rows gives"
        )
    return {
        "row": Arg(rows.row_TK, _INT32, "tokens, copies"),
        "offset": Arg(rows.offset_E1, _INT32, "experts + 1"),
    }


_expert_rows = operator(
    "expert_rows(Tensor expert, int num_experts) -> (Tensor row, Tensor offset)",
    lambda ops, expert, num_experts: tuple(ops.expert_rows(expert, num_experts)),
    lambda expert, num_experts: (
        expert.new_empty(expert.shape, dtype=torch.int32),
        expert.new_empty(num_experts + 1, dtype=torch.int32),
    ),
)


def expert_rows(expert_TK: Tensor, num_experts: int) -> RowMap:
    """The map that sorts copies of tokens by expert, stably and on the device.

    expert_TK: int32 or int64 [T, K], each token's experts; an index outside 0 ... E - 1 drops the
    copy.
    """
    check("expert_rows", expert=Arg(expert_TK, INDEX))
    return RowMap(*_expert_rows(expert_TK, num_experts))


# --- rows ----------------------------------------------------------------------------------------


def _compute_permute(ops: Kernels, x: Tensor, row: Tensor, offset: Tensor) -> Tensor:
    _check_row_values("permute", row)
    return ops.permute(x, RowMap(row, offset))


def _compute_unpermute(
    ops: Kernels, y: Tensor, row: Tensor, offset: Tensor, weight: Tensor | None = None
) -> Tensor:
    _check_row_values("unpermute", row)
    return ops.unpermute(y, RowMap(row, offset), weight)


def _check_row_values(operation: str, row_TK: Tensor) -> None:
    """Raise ValueError if a map on a CPU does not hold each row once."""
    if row_TK.device.type != "cpu" or not row_TK.numel():
        return
    position = row_TK.where(row_TK >= 0, -1 - row_TK).flatten().long()
    held = torch.zeros(len(position), dtype=torch.bool)
    if int(position.max()) < len(held):
        held[position] = True
    if not held.all():
        raise ValueError(
            f"{operation}: row does not hold each of {len(held)} rows once; pass what expert_rows "
            "gives"
        )


_permute: Operator = operator(
    "permute(Tensor x, Tensor row, Tensor offset) -> Tensor y",
    _compute_permute,
    lambda x, row, offset: new(x, row.numel(), x.shape[1]),
    lambda dy, row, offset: {"dx": _unpermute(dy, row, offset)},
)
_unpermute: Operator = operator(
    "unpermute(Tensor y, Tensor row, Tensor offset) -> Tensor out",
    _compute_unpermute,
    lambda y, row, offset: new(y, len(row), y.shape[1]),
    lambda dout, row, offset: {"dy": _permute(dout, row, offset)},
)
_unpermute_grad = operator(
    "unpermute_grad(Tensor dout, Tensor y, Tensor row, Tensor offset, Tensor weight)"
    " -> (Tensor dy, Tensor dweight)",
    lambda ops, dout, y, row, offset, weight: ops.unpermute_grad(
        dout, y, RowMap(row, offset), weight
    ),
    lambda dout, y, row, offset, weight: (new(y), new(weight)),
)
_unpermute_weighted = operator(
    "unpermute_weighted(Tensor y, Tensor row, Tensor offset, Tensor weight) -> Tensor out",
    _compute_unpermute,
    lambda y, row, offset, weight: new(y, len(row), y.shape[1]),
    _unpermute_grad,
)


def permute(x_TD: Tensor, rows: RowMap) -> Tensor:
    """y[T * K, D]: each copy of a token in its row, zeros in the rows of dropped copies."""
    mapped = _map_args("permute", rows)
    check("permute", **mapped, x=Arg(x_TD, FLOATS, "tokens, columns"))
    y: Tensor = _permute(rows_readable(x_TD), *rows)
    return y


def unpermute(y_RD: Tensor, rows: RowMap, weight_TK: Tensor | None = None) -> Tensor:
    """out[T, D]: the sum of each token's rows, times its router weights."""
    weight = Arg(weight_TK, PARAMETER, "tokens, copies", optional=True)
    mapped = _map_args("unpermute", rows)
    sizes = check("unpermute", y=Arg(y_RD, FLOATS, "rows, columns"), **mapped, weight=weight)
    if sizes["rows"] != sizes["tokens"] * sizes["copies"]:
        raise ValueError(
            f"unpermute: y has {sizes['rows']} rows, the map {sizes['tokens'] * sizes['copies']}"
        )
    y_RD = rows_readable(y_RD)
    out: Tensor = (
        _unpermute(y_RD, *rows)
        if weight_TK is None
        else _unpermute_weighted(y_RD, *rows, weight_TK)
    )
    return out


# --- products ------------------------------------------------------------------------------------


def _compute_grouped(ops: Kernels, x: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
    if offset.device.type == "cpu":
        offsets = offset.tolist()
        if offsets[0] != 0 or sorted(offsets) != offsets or offsets[-1] > len(x):
            raise ValueError(
                f"grouped_linear: offset is {offsets[:8]}, expected to rise from 0 to at most "
                f"{len(x)}; pass what expert_rows gives"
            )
    return ops.grouped_linear(x, weight, offset)


def _compute_grouped_grad(
    ops: Kernels, dy: Tensor, x: Tensor, weight: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx, dweight in the summing type)."""
    dweight = new_stats(x, *weight.shape)
    ops.grouped_weight_grad_(dweight, dy, x, offset, accumulate=False)
    return ops.grouped_linear_input_grad(dy, weight, offset), dweight


_grouped_grad = operator(
    "grouped_linear_grad(Tensor dy, Tensor x, Tensor weight, Tensor offset)"
    " -> (Tensor dx, Tensor dweight)",
    _compute_grouped_grad,
    lambda dy, x, weight, offset: (new(x), new_stats(x, *weight.shape)),
)
_grouped_linear = operator(
    "grouped_linear(Tensor x, Tensor weight, Tensor offset) -> Tensor y",
    _compute_grouped,
    lambda x, weight, offset: new(x, len(x), weight.shape[1]),
    _grouped_grad,
)


def grouped_linear(x_RD: Tensor, weight_EFD: Tensor, rows: RowMap) -> Tensor:
    """y[R, F] = x @ weight[e]^T for the rows of each expert e, 0 in the rows after the last."""
    mapped = _map_args("grouped_linear", rows)
    weight = Arg(weight_EFD, "x", "experts, out, columns")
    sizes = check("grouped_linear", x=Arg(x_RD, FLOATS, "rows, columns"), weight=weight, **mapped)
    if sizes["experts + 1"] != sizes["experts"] + 1:
        raise ValueError(
            f"grouped_linear: weight has {sizes['experts']} experts, the map "
            f"{sizes['experts + 1'] - 1}"
        )
    if sizes["rows"] < sizes["tokens"] * sizes["copies"]:
        raise ValueError(
            f"grouped_linear: x has {sizes['rows']} rows, the map "
            f"{sizes['tokens'] * sizes['copies']}"
        )
    y: Tensor = _grouped_linear(rows_readable(x_RD), weight_EFD.contiguous(), rows.offset_E1)
    return y
