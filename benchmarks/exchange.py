"""Weights from a Hugging Face folder at tp 2 x pp 2, against safetensors' own load in one process.

Makes a folder of random weights (a Llama, in bfloat16 or float32), starts four ranks with random
weights and four with those of the folder, and loads the same files by the library. Prints one JSON
line: seconds, and the peak of resident memory of each rank.

    python -m benchmarks.exchange --date 2026-12-01
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.circumstances import circumstances
from megalite.checks import check_and_resolve
from megalite.config import RunConfig
from megalite.distributed.agree import ALONE
from megalite.distributed.mesh import Mesh
from megalite.exchange.classes import class_for
from megalite.exchange.tensors import parts_of
from megalite.exchange.write import Item, files_of, put_json, write_folder
from megalite.layout.topology import Topology
from megalite.process.launcher import Launch
from megalite.process.local import run_local
from megalite.train.engine import Engine
from megalite.train.weights import load_weights

_SIZES = {"num_layers": 8, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 8}
_SIZES |= {"ffn_hidden_size": 5632, "vocab_size": 32000}


def run_config(num_layers: int) -> RunConfig:
    """The run of four ranks; its data are never read."""
    tree = {
        "model": {**_SIZES, "num_layers": num_layers},
        "parallel": {"tp": 2, "pp": 2, "dp": 1},
        "data": {"path": "none", "seq_length": 128},
        "train": {"steps": 0, "global_batch": 4},
    }
    return check_and_resolve(RunConfig.model_validate(tree), 4)


def make_folder(folder: Path, config: RunConfig, dtype: torch.dtype) -> int:
    """Write a folder of random weights in files of 300 MB; returns the bytes of its weights."""
    row = class_for(config.model)
    tensors, _ = parts_of(config.model, row.names)
    shapes = {part.name: part.shape for parts in tensors.values() for part in parts}

    def fill(data: torch.Tensor) -> None:
        data.normal_(0, 0.02)

    items = [Item(name, dtype, shape, fill) for name, shape in shapes.items()]
    files = files_of(items, 300_000_000, "model")

    def finish(directory: Path, _: Any) -> list[str]:
        places = {one.name: file for file, group in files.items() for one in group}
        put_json(directory, "model.safetensors.index.json", {"weight_map": places})
        put_json(directory, "config.json", row.write(config.model))
        return []

    write_folder(folder, files, finish, ALONE)
    return sum(one.size_bytes for one in items)


def rank(launch: Launch, device: torch.device, text: str, named: str | None, out: str) -> None:
    """Build the engine, load the weights if a folder is named, and write this rank's figures."""
    config = RunConfig.model_validate_json(text)
    mesh = Mesh(Topology.of(config.parallel), device, timeout_s=600.0)
    mesh.create()
    engine = Engine(config, mesh)
    gc.collect()
    began = time.perf_counter()
    if named is not None:
        load_weights(engine, named)
    seconds = time.perf_counter() - began
    found = {"seconds": seconds, "peak_mib": _peak_mib()}
    Path(out, f"{launch.rank}.json").write_text(json.dumps(found))


def _peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def start(config: RunConfig, named: str | None) -> list[dict[str, float]]:
    """The figures of the four ranks."""
    with tempfile.TemporaryDirectory() as out:
        code = run_local(rank, 4, (config.model_dump_json(), named, out), device="cpu")
        assert code == 0, code
        return [json.loads(Path(out, f"{r}.json").read_text()) for r in range(4)]


def library(folder: Path) -> float:
    """Seconds of safetensors' own load of all files and the cast to float32, in this process."""
    began = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        for tensor in load_file(file).values():
            tensor.to(torch.float32, copy=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--date")
    parser.add_argument("--output", type=Path, help="file of rows to add this one to")
    args = parser.parse_args()
    row = circumstances("exchange", args.date)
    config = run_config(args.layers)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "model")
        size = make_folder(folder, config, getattr(torch, args.dtype))
        plain = start(config, None)
        rounds = [(start(config, f"hf:{folder}"), library(folder)) for _ in range(args.rounds)]
    vocabulary = _SIZES["vocab_size"] * _SIZES["hidden_size"] * 4 / 2**20
    row |= {
        "layout": {"tp": 2, "pp": 2},
        "dtype": args.dtype,
        "folder_bytes": size,
        "largest_tensor_mib": vocabulary,
        "load_weights_s": [max(one["seconds"] for one in ranks) for ranks, _ in rounds],
        "library_s": [seconds for _, seconds in rounds],
        "extra_peak_mib": [
            max(
                one["peak_mib"] - before["peak_mib"]
                for one, before in zip(ranks, plain, strict=True)
            )
            for ranks, _ in rounds
        ],
    }
    line = json.dumps(row)
    print(line)
    if args.output is not None:
        with args.output.open("a") as file:
            file.write(f"{line}\n")


if __name__ == "__main__":
    main()
