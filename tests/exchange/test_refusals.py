"""Folders that are refused: every problem at once, each by its name, before a tensor is read."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.errors import CheckpointError, ConfigError
from megalite.exchange.folder import open_folder, open_weights
from tests.exchange.kit import LLAMA3, MODELS, edit, rewrite, save, stock, whole


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("refusals")
    for name in ("llama", "qwen2", "gpt2", "mistral"):
        save(stock(MODELS[name]), root / name)
    return root


@pytest.fixture
def make(saved: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a class's folder, to be spoiled."""
    return lambda name: Path(shutil.copytree(saved / name, tmp_path / name))


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_folder(folder, **options)
    return str(caught.value).removeprefix(f"reading {folder.name}: ")


@pytest.mark.parametrize(
    ("name", "keys", "problem"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic': megalite scales"),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "lacks factor, lacks low_freq_"),
        ("llama", {"rope_parameters": LLAMA3 | {"beta": 1}}, "has beta, which is unknown"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "has one rotation for all layers"),
        ("llama", {"rope_scaling": "linear"}, "it needs to be a table or null"),
        ("llama", {"partial_rotary_factor": 0.5}, "this class rotates whole heads"),
        ("llama", {"hidden_act": "relu"}, "no such model.activation; it has silu, "),
        ("llama", {"num_key_value_heads": 3}, "model.num_kv_heads=3 does not divide"),
        ("llama", {"hidden_size": "32"}, "model.hidden_size = '32': Input should be a valid int"),
        ("llama", {"rms_norm_eps": -1.0}, "model.norm_eps = -1.0: Input should be greater than 0"),
        ("llama", {"is_encoder_decoder": True}, "megalite has no encoder; it takes False"),
        ("llama", {"auto_map": {"AutoModel": "m.M"}}, "auto_map = {'AutoModel': 'm.M'} is not "),
        ("llama", {"quantization_config": {"bits": 4}}, "--ignore quantization_config"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "no class that is known"),
        ("llama", {"model_type": "mistral"}, "no class that is known"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "no attention scaled by the layer"),
        ("gpt2", {"add_cross_attention": True}, "no attention to another model's states"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "chunked_attention"] * 2},
            "megalite has no such layers; it has full_attention, sliding_attention",
        ),
    ],
)
def test_a_config_that_cannot_be_followed(make: Any, name: str, keys: Any, problem: str) -> None:
    folder = make(name)
    edit(folder, **keys)
    assert problem in refused(folder)


def test_unknown_keys_are_listed_together_and_may_be_ignored(make: Any) -> None:
    folder = make("llama")
    edit(folder, mup=True, extra_scale=2.0, hidden_act="relu")
    lines = refused(folder).splitlines()
    assert [line.split(" = ")[0] for line in lines] == [
        "config.json: hidden_act",
        "config.json: mup",
        "config.json: extra_scale",
    ]
    edit(folder, hidden_act="silu")
    open_folder(folder, ignore=frozenset({"mup", "extra_scale"}))


def test_tensors_that_are_missing_left_over_or_of_another_shape(make: Any) -> None:
    folder = make("llama")
    tensors = whole(folder)
    del tensors["lm_head.weight"], tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(40, 32)
    tensors["model.layers.1.input_layernorm.weight"] = torch.zeros(32, dtype=torch.int8)
    tensors["adapter.weight"] = torch.zeros(2)
    rewrite(folder, tensors)
    missing, left_over, shape, kind, *more = refused(folder).splitlines()
    assert missing.endswith(": lm_head.weight, model.layers.2.mlp.up_proj.weight")
    assert left_over.startswith("adapter.weight [2] has no place in LlamaForCausalLM")
    assert shape == (
        "model.layers.0.self_attn.q_proj.weight is [40, 32], by config.json it needs to be [48, 32]"
    )
    assert kind.startswith("model.layers.1.input_layernorm.weight is stored as I8; weights need to")
    assert more == []


def test_parts_of_several_types_are_refused(make: Any) -> None:
    folder = make("llama")
    tensors = whole(folder)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(24, 32, dtype=torch.float16)
    rewrite(folder, tensors)
    assert "layers.0.attention.qkv.weight is one tensor here, its parts have several" in refused(
        folder
    )


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("/nonexistent-megalite").mkdir, ())


@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("pytorch_model.bin", "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"),
        ("model_optim_rng.pt", "pickles can run code and are not read"),
        ("__0_0.distcp", "is a torch_dist checkpoint, whose metadata are pickles"),
        ("notes.txt", "holds neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_no_pickle_is_opened(make: Any, file: str, remedy: str) -> None:
    folder = make("llama")
    for path in folder.glob("model*"):
        path.unlink()
    (folder / file).write_bytes(pickle.dumps(Payload()))
    assert remedy in refused(folder)


def test_an_index_that_is_wrong(make: Any) -> None:
    folder = make("llama")
    name = "model.safetensors.index.json"
    index = json.loads((folder / name).read_text())["weight_map"]
    key, file = next(iter(index.items()))
    edit(folder, name, weight_map={**index, key: "../outside.safetensors"})
    assert "'../outside.safetensors' is no plain name" in refused(folder)
    edit(folder, name, weight_map={**index, key: "model-9.safetensors"})
    assert "model-9.safetensors is missing, which model.safetensors.index.json" in refused(folder)
    other = next(one for one in index.values() if one != file)
    edit(folder, name, weight_map={**index, key: other})
    assert f"not where it says: {key}" in refused(folder)
    edit(folder, name, weight_map=[])
    assert "holds no weight_map of names" in refused(folder)


@pytest.mark.parametrize("spoil", [lambda data: data[:-5], lambda data: b"\xff" * 8 + data[8:]])
def test_a_file_that_is_cut_or_no_safetensors(make: Any, spoil: Any) -> None:
    folder = make("llama")
    path = next(folder.glob("model-00002*"))
    path.write_bytes(spoil(path.read_bytes()))
    assert f"{path} is not a sound safetensors file: " in refused(folder)


def test_paths_that_lead_nowhere(make: Any, tmp_path: Path) -> None:
    assert "is no folder; give one with config.json" in refused(tmp_path / "none")
    folder = make("llama")
    (folder / "config.json").write_text("[1]")
    assert "config.json holds no JSON object" in refused(folder)
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").touch()
    assert "merge it into its model first" in refused(folder)
    with pytest.raises(ConfigError, match="step 3 has no effect on hf:"):
        open_weights(f"hf:{folder}", step=3)


def test_a_link_of_a_download_cache_is_followed(make: Any, tmp_path: Path) -> None:
    folder = make("llama")
    for path in list(folder.glob("*.safetensors")):
        blob = path.rename(tmp_path / f"blob-{path.name}")
        path.symlink_to(blob)
    assert len(open_folder(folder).manifest.tensors) == 35
