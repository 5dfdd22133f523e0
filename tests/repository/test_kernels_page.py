"""docs/kernels.md says something about every choice and every function."""

from __future__ import annotations

import re
import typing

from megalite.config import KernelsConfig, OptimizerConfig
from megalite.kernels import functional
from tests import ROOT

PAGE = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")


def test_it_has_every_choice_and_every_function() -> None:
    choices = [*KernelsConfig.model_fields.items(), ("adam", OptimizerConfig.model_fields["adam"])]
    for setting, field in choices:
        assert f".{setting}`" in PAGE
        for value in typing.get_args(field.annotation):
            assert f'`"{value}"`' in PAGE, f"{setting}={value}"
    for name in set(functional.__all__) - {"Intervals", "RowMap"}:
        assert re.search(rf"`{name}`", PAGE), f"megalite.kernels.functional.{name}"
