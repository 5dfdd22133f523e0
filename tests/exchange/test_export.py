"""What is written beside the weights, which class is chosen, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megalite.checkpoint.find import Checkpoint, find_checkpoint, open_checkpoint
from megalite.checkpoint.pieces import NamedPiece
from megalite.checkpoint.save import save as save_checkpoint
from megalite.config import ModelConfig
from megalite.data.tokenizer import open_tokenizer
from megalite.errors import CheckpointError, ConfigError
from megalite.exchange.classes import class_for, weights_config
from megalite.exchange.convert import convert
from megalite.exchange.export import export
from megalite.exchange.folder import open_folder
from megalite.generate.generate import load_model
from megalite.generate.stock import check_logits
from megalite.run.parameters import stage_parameters, whole_model
from tests.corpus.kit import make_tokenizer
from tests.exchange.kit import MODELS, edit, save, stock, stock_logits, tokens, whole
from tests.tolerances import EXCHANGE_FLOAT32

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 20,
    "vocab_size": 29,
    "vocab_pad_multiple": 8,
}


def checkpoint(
    root: Path, kinds: tuple[str, ...] = ("param",), tokenizer: str | None = None, **model: Any
) -> Checkpoint:
    """A checkpoint of drawn weights as a run saves it, with padding rows in the vocabulary."""
    config = weights_config(ModelConfig(**{**SMALL, **model}), 40, tokenizer)
    pieces = []
    for kind in kinds:
        generator = torch.Generator().manual_seed(len(kind))
        for spec in stage_parameters(config.model, whole_model(config.model)):
            data = torch.randn(spec.shape, generator=generator)
            pieces.append(NamedPiece.of_shard(kind, spec, 1, 0, data))
    saved = config.model_dump(mode="json")
    path = save_checkpoint(root, 1, pieces, state={"trainer": {}}, config=saved, layout={})
    return open_checkpoint(path)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({}, "LlamaForCausalLM"),
        ({"qk_norm": True}, "Qwen3ForCausalLM"),
        ({"qkv_bias": True}, "Qwen2ForCausalLM"),
        ({"sliding_window": 7}, "MistralForCausalLM"),
        ({"family": "qwen3", "qk_norm": False}, "LlamaForCausalLM"),
        ({"family": "gpt2", "num_kv_heads": None}, "GPT2LMHeadModel"),
    ],
)
def test_the_class_follows_from_the_traits(model: Any, name: str, tmp_path: Path) -> None:
    found = checkpoint(tmp_path / "run", **model)
    lines = export(found, tmp_path / "out")
    assert lines[0].startswith(f"wrote {tmp_path / 'out'}: {name}, ")
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs).__name__ == name
    assert theirs.config.vocab_size == 29
    assert theirs.get_input_embeddings().weight.shape[0] == 29
    assert check_logits(found, tmp_path / "out", "param", None).startswith("checked with ")


def test_a_model_of_no_class_is_refused_with_its_traits(tmp_path: Path) -> None:
    found = checkpoint(tmp_path / "run", norm="layernorm", qk_norm=True)
    with pytest.raises(CheckpointError, match="LlamaForCausalLM has no ") as caught:
        export(found, tmp_path / "out")
    assert 'model.norm="layernorm", model.qk_norm=true' in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_average_and_a_narrower_type(tmp_path: Path) -> None:
    found = checkpoint(tmp_path / "run", ("param", "ema"))
    lines = export(found, tmp_path / "out", weights="ema", dtype="bfloat16")
    assert "weights are float32, rounded to bfloat16" in lines
    export(found, tmp_path / "param", dtype="bfloat16")
    ema, param = whole(tmp_path / "out"), whole(tmp_path / "param")
    assert {t.dtype for t in ema.values()} == {torch.bfloat16}
    assert not torch.equal(ema["lm_head.weight"], param["lm_head.weight"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    with pytest.raises(ConfigError, match="holds no average of the weights; leave out --ema"):
        export(checkpoint(tmp_path / "plain"), tmp_path / "none", weights="ema")


def test_a_check_that_fails_names_both(tmp_path: Path) -> None:
    found = checkpoint(tmp_path / "run")
    export(found, tmp_path / "out")
    edit(tmp_path / "out", rms_norm_eps=0.5)
    with pytest.raises(CheckpointError, match="they do not compute the same"):
        check_logits(found, tmp_path / "out", "param", None)
    with mock.patch.dict(sys.modules, transformers=None), pytest.raises(ConfigError) as caught:
        check_logits(found, tmp_path / "out", "param", None)
    assert "--check compares with transformers, which is not installed" in str(caught.value)


def test_the_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    found = checkpoint(tmp_path / "run")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(ConfigError, match="there exists; give a new name, or remove it"):
        export(found, tmp_path / "there")
    full = OSError(28, "No space left on device")
    for method in ("write", "rename"):
        failing = mock.patch(f"megalite.exchange.write.Disk.{method}", side_effect=full)
        refused = pytest.raises(CheckpointError, match="No space left on device; make room")
        with failing, refused:
            export(found, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there"]


def test_ranks_of_a_launcher_share_the_files(tmp_path: Path) -> None:
    """The files of three processes are those of one, but for nothing."""
    checkpoint(tmp_path / "run")
    export(find_checkpoint(tmp_path / "run"), tmp_path / "one")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3"]
    command = [*launcher, "-m", "megalite", "hf", "export", "run", "three"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("wrote three: LlamaForCausalLM, 21 tensors in 1 file, ")
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "three").iterdir()} == files


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_megatron_cores_names(name: str, tmp_path: Path) -> None:
    """Out and in again; its packing is ours: q, k and v of a group follow each other."""
    source = save(stock(MODELS[name]), tmp_path / "a")
    export(open_folder(source), tmp_path / "core", megatron=True)
    core, theirs = whole(tmp_path / "core"), whole(source)
    assert all(key.startswith(("decoder.", "embedding.", "output_layer.")) for key in core)
    if name == "llama":
        groups = core["decoder.layers.3.self_attention.linear_qkv.weight"].view(2, 4, 12, 32)
        k = theirs["model.layers.3.self_attn.k_proj.weight"]
        assert torch.equal(groups[:, 2].flatten(0, 1), k)
        gate = theirs["model.layers.1.mlp.gate_proj.weight"]
        assert torch.equal(core["decoder.layers.1.mlp.linear_fc1.weight"][:44], gate)
        norm = theirs["model.layers.2.post_attention_layernorm.weight"]
        assert torch.equal(core["decoder.layers.2.mlp.linear_fc1.layer_norm_weight"], norm)

    # As its own layers without Transformer Engine name the norms, and with rows that pad.
    for key in list(core):
        local = key.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        core[local.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")] = core.pop(key)
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if key in core:
            core[key] = F.pad(core[key], (0, 0, 0, 3), value=9.0)
    save_file(core, tmp_path / "core" / "model.safetensors")
    export(open_folder(tmp_path / "core"), tmp_path / "back")
    back = whole(tmp_path / "back")
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[key], theirs[key]) for key in back)


def test_an_imported_checkpoint_is_its_folder(tmp_path: Path) -> None:
    """Tokenizer files and special ids travel along; the source's hashes are on record."""
    model = stock(MODELS["llama"])
    source = save(model, tmp_path / "a", torch.bfloat16)
    edit(source, "tokenizer_config.json", chat_template="{{ x }}")
    edit(source, "generation_config.json", temperature=0.25)
    convert(open_folder(source), tmp_path / "out", max_file_bytes=30_000)
    made = find_checkpoint(tmp_path / "out")
    assert {tensor.dtype for tensor in made.manifest.tensors.values()} == {"bfloat16"}
    assert len(made.manifest.files) > 2
    record: Any = made.manifest.state["source"]
    assert record["sha256"].keys() == {p.name for p in source.glob("model-*")} | {"config.json"}
    ours, _ = load_model(made)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        assert (ours.logits(tokens()) - stock_logits(theirs)).abs().max() <= EXCHANGE_FLOAT32 * 5

    lines = export(made, tmp_path / "back")
    assert f"tokenizer of {tmp_path / 'out'}: tokenizer_config.json" in lines
    config = AutoConfig.from_pretrained(tmp_path / "back")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (3, [4, 5], 6)
    assert config.max_position_embeddings == 77
    kept = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert kept["temperature"] == 0.25
    before, after = whole(source), whole(tmp_path / "back")
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("model", [{}, {"family": "gpt2", "num_kv_heads": None}])
def test_a_runs_own_tokenizer_makes_the_same_ids(model: Any, tmp_path: Path) -> None:
    """Of a sentencepiece model, with its special tokens, whatever the class of the model."""
    make_tokenizer(
        "builtin", str(tmp_path / "own.model"), vocab_size=400, model_type="bpe", max_bytes=100_000
    )
    ours = open_tokenizer(tmp_path / "own.model")
    found = checkpoint(tmp_path / "run", tokenizer=str(tmp_path / "own.model"), **model)
    lines = export(found, tmp_path / "out")
    assert f"tokenizer {tmp_path / 'own.model'}" in lines
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("def f(x):\n    return  x + 1", " héllo 漢字\t", ""):
        assert theirs(text).input_ids == ours.encode(text)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.bos_token_id, config.eos_token_id) == (ours.bos_id, ours.eos_id)
    assert config.n_positions == 1024 if model else config.max_position_embeddings == 40


def test_every_family_of_the_schema_has_a_class() -> None:
    families = ModelConfig.model_fields["family"].annotation
    for family in families.__args__:  # type: ignore[union-attr]
        row = class_for(ModelConfig(family=family, **SMALL | {"num_kv_heads": None}))
        assert row.family == family
