"""docs/kernels.md: its programs run, and it says something about every choice and function."""

from __future__ import annotations

import re
import typing

import pytest

from megalite.config import KernelsConfig, OptimizerConfig
from megalite.kernels import functional
from tests import ROOT

PAGE = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_its_programs_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, typing.Any] = {}
    for program in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(program, "docs/kernels.md", "exec"), names)
    assert capsys.readouterr().out in ("reference\n", "triton\n")
    assert all(parameter.grad is not None for parameter in (names["first"], names["back"]))


def test_it_has_every_choice_and_every_function() -> None:
    choices = [*KernelsConfig.model_fields.items(), ("adam", OptimizerConfig.model_fields["adam"])]
    for setting, field in choices:
        assert f".{setting}`" in PAGE
        for value in typing.get_args(field.annotation):
            assert f'`"{value}"`' in PAGE, f"{setting}={value}"
    for name in set(functional.__all__) - {"Intervals", "RowMap"}:
        assert re.search(rf"`{name}`", PAGE), f"megalite.kernels.functional.{name}"
