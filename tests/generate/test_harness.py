"""lm-evaluation-harness on a local task: our model beside the harness's own for transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM

from megalite.generate.harness import MegaliteLM
from tests.corpus.kit.hugging_face import BOS, EOS, bytes_tokenizer, write_folder
from tests.exchange.kit import MODELS, save, stock

QUESTIONS = [
    ("def read_file(path):", [" return open(path)", " the lazy dog", " Paris"], 0),
    ("The quick brown fox", [" jumps over", " def", " user assistant system and more"], 1),
    ("What is the capital of France? It is", [" Paris.", " a book", " numbers"], 2),
    ("", [" reads a book", " x", " path):\n    return"], 0),
]
TEXTS = ["The quick brown fox jumps over the lazy dog. " * 9, "def f():\n", "\u4e2d\u2026 x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a model, whose context of 77 is shorter than a text, and data."""
    path = tmp_path_factory.mktemp("harness")
    made = bytes_tokenizer(adds_bos=True)
    size = made.get_vocab_size()
    save(stock({**MODELS["llama"], "vocab_size": size}), path / "model")
    write_folder(path / "model", made, add_bos_token=True, bos_token=BOS, eos_token=EOS)
    rows = [{"question": q, "choices": c, "answer": a} for q, c, a in QUESTIONS]
    (path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return path


def tasks(folder: Path) -> list[dict[str, Any]]:
    def local(name: str, file: str, **more: Any) -> dict[str, Any]:
        data = {"data_files": {"test": str(folder / file)}, "cache_dir": str(folder / "cache")}
        return {"task": name, "dataset_path": "json", "dataset_kwargs": data,
                "test_split": "test", **more}  # fmt: skip

    accuracy = [{"metric": name, "aggregation": "mean", "higher_is_better": True}
                for name in ("acc", "acc_norm")]  # fmt: skip
    perplexity = [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]
    return [
        local("choose", "questions.jsonl", output_type="multiple_choice",
              doc_to_text="{{question}}", doc_to_choice="{{choices}}", doc_to_target="{{answer}}",
              metric_list=accuracy),
        local("read", "texts.jsonl", output_type="loglikelihood_rolling", doc_to_text="",
              doc_to_target="{{text}}", metric_list=perplexity),
        local("write", "questions.jsonl", output_type="generate_until",
              doc_to_text="x {{question}}", doc_to_target="{{choices[0]}}",
              generation_kwargs={"until": ["e"], "max_gen_toks": 24},
              metric_list=[{"metric": "exact_match"}]),
    ]  # fmt: skip


def answers(folder: Path, model: Any) -> dict[str, Any]:
    found: Any = simple_evaluate(model=model, tasks=tasks(folder), bootstrap_iters=0)
    samples = {
        name: [each["resps"] for each in sorted(lines, key=lambda each: each["doc_id"])]
        for name, lines in found["samples"].items()
    }
    return {"results": found["results"], "samples": samples}


def test_the_harness_agrees_with_transformers_on_the_same_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-4 in float32: each choice, whole texts in windows, and generated text."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    theirs = answers(folder, HFLM(str(folder / "model"), dtype="float32", device="cpu"))
    ours = answers(folder, MegaliteLM(f"hf:{folder / 'model'}", batch_size=3))
    assert ours["samples"].keys() == {"choose", "read", "write"}
    for name in ("choose", "read"):
        for mine, their in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            for one, other in zip(numbers(mine), numbers(their), strict=True):
                assert one == pytest.approx(other, rel=1e-4)
    assert ours["samples"]["write"] == theirs["samples"]["write"]
    for name, values in theirs["results"].items():
        for metric, value in values.items():
            mine = ours["results"][name][metric]
            assert mine == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value)


def numbers(value: Any) -> list[float]:
    """All numbers in nested lists; True and False count as 1 and 0."""
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in numbers(item)]
    return [float(value)]


def test_the_command_line_of_the_harness_knows_the_model(folder: Path, tmp_path: Path) -> None:
    (choose, *_) = tasks(folder)
    (tmp_path / "choose.yaml").write_text(json.dumps(choose))  # JSON is YAML
    done = subprocess.run(
        [sys.executable, "-m", "megalite.generate.harness", "run", "--model", "megalite",
         "--model_args", f"source=hf:{folder / 'model'}", "--tasks", "choose", "--device", "cpu",
         "--include_path", str(tmp_path)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "|choose|" in done.stdout
