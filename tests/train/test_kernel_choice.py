"""`kernels` of a config: what is chosen, refused, recorded, and told at a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checks.settings import check_config
from megalite.config import RunConfig
from megalite.errors import CheckpointError, ConfigError
from megalite.kernels import BackendError, Kernels, select
from megalite.train import kernel_choice
from megalite.train.kernel_choice import (
    choose_kernels,
    generation_kernels,
    kernel_notice,
    plain_on_gpu,
)
from tests.pool import RankPool
from tests.train.kit.runs import lines, losses, make_config, train, write_tokens

CPU = torch.device("cpu")


def choose(tmp_path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Kernels:
    return choose_kernels(make_config(tmp_path, "run", **changes), CPU, dtype)


def test_plain_torch_computes_on_cpu(tmp_path: Path) -> None:
    assert choose(tmp_path).name == "reference"
    assert choose(tmp_path, kernels__backend="reference").name == "reference"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"kernels__backend": "triton"},
            "kernels.backend=triton cannot be used: the device is cpu, triton needs cuda; use "
            "auto or reference",
        ),
        (
            {"kernels__backend": "interpret"},
            "kernels.backend=interpret cannot be used: TRITON_INTERPRET=1 must be set before "
            "triton is imported; or use reference",
        ),
        (
            {"kernels__attention": "fa3", "train__dtype": "bfloat16"},
            "kernels.attention=fa3 needs a CUDA device",
        ),
        (
            {"kernels__norm": "apex"},
            "kernels.norm=apex needs a CUDA device, this one is cpu; use kernels.norm=auto",
        ),
        (
            {"optimizer__adam": "apex"},
            "optimizer.adam=apex needs a CUDA device, this one is cpu; use optimizer.adam=fused",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose(tmp_path, **changes)
    assert told in str(error.value)


def test_everything_that_cannot_be_had_is_told_at_once(tmp_path: Path) -> None:
    asked = {
        "kernels__backend": "triton",
        "kernels__attention": "fa3",
        "kernels__norm": "apex",
        "optimizer__adam": "apex",
        "train__dtype": "bfloat16",
    }
    with pytest.raises(ConfigError) as error:
        choose(tmp_path, torch.bfloat16, **asked)
    settings = [line.split("=")[0] for line in error.value.problems]
    assert settings == ["kernels.backend", "kernels.attention", "kernels.norm", "optimizer.adam"]


PICKY = Kernels(name="triton", uses_tables=True, head_dims=())  # takes no model


def test_texts_are_continued_on_whatever_takes_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[Kernels] = [Kernels(), PICKY]
    monkeypatch.setattr(kernel_choice, "select", lambda *_, **__: kinds[-1])
    config = make_config(tmp_path, "run")
    assert generation_kernels(config, CPU, torch.float32).name == "reference"
    kinds.pop()
    assert generation_kernels(config, CPU, torch.float32) is kinds[-1]
    asked = make_config(tmp_path, "run", kernels__backend="reference")
    assert generation_kernels(asked, CPU, torch.float32) is not kinds[-1]
    kinds.append(PICKY)
    with pytest.raises(ConfigError, match="no kernel for a head dim"):
        choose_kernels(config, CPU, torch.float32)


def test_a_triton_that_is_broken_is_told_before_texts_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Kernels:
        raise BackendError("triton is installed but cannot be imported")

    monkeypatch.setattr(kernel_choice, "select", broken)
    with pytest.raises(ConfigError, match="cannot be imported"):
        generation_kernels(make_config(tmp_path, "run"), CPU, torch.float32)


def test_a_gpu_on_plain_torch_is_told_why(tmp_path: Path) -> None:
    gpu, ops = torch.device("cuda"), Kernels()
    config = make_config(tmp_path, "run")
    (told,) = plain_on_gpu(config, ops, gpu, torch.float64)
    assert told == (
        "plain torch computes on cuda: kernels.backend=triton cannot be used: its kernels take "
        "float32, bfloat16 and float16, not torch.float64; use reference"
    )
    assert plain_on_gpu(config, ops, CPU, torch.float64) == []
    assert plain_on_gpu(config, PICKY, gpu, torch.float64) == []
    asked = make_config(tmp_path, "run", kernels__backend="reference")
    assert plain_on_gpu(asked, ops, gpu, torch.float64) == []


def test_names_are_checked_where_no_config_does() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"backend": "cuda"}, "allowed: auto, triton, reference, interpret"),
        ({"attention": "xformers"}, "allowed: auto, sdpa_flash"),
        ({"norm": "liger"}, "kernels.norm is 'liger'; allowed: auto, apex"),
        ({"adam": "liger"}, "optimizer.adam is 'liger'; allowed: auto, apex"),
    ]
    for option, told in refused:
        with pytest.raises(BackendError, match=told):
            select(**option)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"kernels__backend": "triton", "train__dtype": "float64"},
            "kernels.backend=triton takes float32, bfloat16 and float16, but train.dtype=float64; "
            "use kernels.backend=reference or auto",
        ),
        (
            {"kernels__attention": "sdpa_flash", "model__attention_dropout": 0.1},
            "kernels.attention=sdpa_flash drops no attention weights, but "
            "model.attention_dropout=0.1; set it to 0, or kernels.attention=auto",
        ),
        (
            {"kernels__attention": "sdpa_flash", "model__sliding_window": 5},
            "kernels.attention=sdpa_flash knows no sliding window, but model.sliding_window=5 "
            "cuts sequences of data.seq_length=16; use fa3, fa4 or auto",
        ),
        (
            {"kernels__attention": "fa4"},
            "kernels.attention=fa4 takes bfloat16 and float16, but train.dtype=float32; use one "
            "of these, or kernels.attention=auto",
        ),
        (
            {"optimizer__adam": "apex", "optimizer__moment_dtype": "bfloat16"},
            "optimizer.adam=apex updates float32 weights and moments, but "
            "optimizer.moment_dtype=bfloat16; change that, or use optimizer.adam=fused",
        ),
        (
            {"kernels__norm": "apex", "model__norm": "layernorm"},
            "kernels.norm=apex has no effect: model.norm=layernorm has no RMSNorm; remove it",
        ),
    ],
)
def test_what_does_not_fit_the_config_is_told_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    tree = make_config(tmp_path, "run").model_dump()
    for key, value in changes.items():
        section, name = key.split("__")
        tree[section][name] = value
    assert line in check_config(RunConfig.model_validate(tree))


def test_another_attention_trains_alike_and_is_on_record(tmp_path: Path, pool: RankPool) -> None:
    write_tokens(tmp_path / "data", 64)
    own = make_config(tmp_path, "own")
    flash = make_config(tmp_path, "flash", kernels__attention="sdpa_flash")
    for outcome in pool.run(train, 1, [(own, None), (flash, None)])[0]:
        assert outcome.code == 0, outcome.error
    assert losses(tmp_path / "flash") == pytest.approx(losses(tmp_path / "own"), rel=1e-5)
    (run,) = lines(tmp_path / "flash", "run")
    assert run["kernels"] == {"name": "reference attention=sdpa_flash", "table": None}


def other_table(ctx: Any, config: RunConfig) -> str:
    """Stop after two steps, then go on where kernels sum in another order; the console's log."""
    train(ctx, [(config, 2)])
    other = {"name": "triton", "table": "f" * 64}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalite.train.resume.kernel_record", lambda ops: other)
        train(ctx, [(config, None)])
    return (Path(config.out) / config.name / "log.txt").read_text(encoding="utf-8")


def test_a_resume_under_other_kernels_says_so(tmp_path: Path, pool: RankPool) -> None:
    write_tokens(tmp_path / "data", 64)
    (log,) = pool.run(other_table, 1, make_config(tmp_path, "run"))
    told = (
        "kernels are triton (table ffffffffffff), saved with reference: losses go on, but not "
        "with the same bits"
    )
    assert log.count(told) == 1
    assert "finished at step 6 of 6" in log


def test_the_same_kernels_are_not_worth_a_word() -> None:
    record = {"name": "triton", "table": "ab"}
    assert kernel_notice(record, dict(record), "step-1") is None
    assert kernel_notice(None, record, "step-1") is None  # from before there was a choice


@pytest.mark.parametrize(
    "saved",
    [7, "triton", [], {}, {"name": None, "table": None}, {"name": "triton", "table": 5}, {"a": 1}],
)
def test_a_damaged_record_of_kernels_is_refused_in_words(saved: Any) -> None:
    with pytest.raises(CheckpointError) as refused:
        kernel_notice(saved, {"name": "reference", "table": None}, "step-00000002")
    assert str(refused.value) == (
        f"step-00000002: its record of kernels is {saved!r}, wanted a name and a table's hash or "
        "none; it is damaged or of another version: resume with the version that saved it, or "
        "from another checkpoint"
    )
