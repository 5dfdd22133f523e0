"""Speed of training configs: tokens/s, TFLOP/s and MFU a GPU, memory, where a step's time goes.

    python benchmarks/mfu.py CONFIG... --local           starts the processes here
    torchrun ... benchmarks/mfu.py CONFIG... --work W    one process a GPU, on any number of nodes
    srun ... python benchmarks/mfu.py CONFIG... --work W the same

Settings (section.key=value) among the CONFIGs replace those of all of them.
One JSON line a config and at last a markdown table, both on standard output of the first process;
progress goes to standard error. The first steps are dropped, nothing is evaluated or saved, and the
text is random tokens unless --data is given. A config that fails gives a row with its error, the
others go on, and the exit code is 1. Each config runs in processes of its own, so that one leaves
nothing behind for the next.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.checks import open_run
from megalite.errors import ConfigError, MegaliteError
from megalite.layout.topology import Topology
from megalite.process.launcher import Launch, read_launch

_RUN = Path(__file__).resolve().with_name("mfu_run.py")

# Below the range from which Linux hands out ports by itself.
_FIRST_PORT, _NUM_PORTS = 15_000, 15_000

_COLUMNS = (
    "config",
    "layout",
    "GPUs",
    "tokens/s/GPU",
    "TFLOP/s/GPU",
    "MFU",
    "MFU causal",
    "peak GiB",
    "step ms",
    "time split",
)


def main(arguments: Sequence[str]) -> int:
    """Measure every config; returns the exit code."""
    options = parse(arguments)
    try:
        launch = read_launch()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.local and launch.source != "single":
        print(f"error: --local, but {launch.source} has started this process", file=sys.stderr)
        return 2
    if launch.source != "single" and options.work is None:
        print(
            f"error: {launch.source} has started this process, so give --work a folder that all "
            "of them share, for random tokens and records",
            file=sys.stderr,
        )
        return 2
    rows = []
    with tempfile.TemporaryDirectory(prefix="mfu-") as folder:
        for index, config in enumerate(options.configs):
            row = measure(options, launch, index, config, Path(folder))
            rows.append(row)
            if launch.rank == 0:
                print(json.dumps(row), flush=True)
                if options.output:
                    with options.output.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
    if launch.rank == 0:
        print("\n" + table(rows))
    return int(any("error" in row for row in rows))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Command-line options."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words",
        nargs="+",
        metavar="CONFIG|SECTION.KEY=VALUE",
        help="runs' TOML files, and settings that replace those of all of them",
    )
    parser.add_argument("--local", action="store_true", help="start the processes here")
    parser.add_argument("--steps", type=int, default=20, help="steps that count (default 20)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them (default 5)")
    parser.add_argument("--data", action="store_true", help="read the config's own data")
    parser.add_argument("--work", type=Path, help="shared folder for random tokens and records")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FOLDER",
        help="profile one step more: Chrome traces of the first and last rank, in FOLDER/N-CONFIG",
    )
    parser.add_argument("--output", type=Path, help="JSON lines are added to this file, too")
    options = parser.parse_intermixed_args(arguments)
    options.settings = [word for word in options.words if "=" in word]
    options.configs = [word for word in options.words if "=" not in word]
    if not options.configs:
        parser.error("give the TOML file of a run, beside the settings")
    if options.steps < 1 or options.warmup < 0:
        parser.error("--steps must be at least 1 and --warmup at least 0")
    return options


def measure(
    options: argparse.Namespace, launch: Launch, index: int, config: str, folder: Path
) -> dict[str, Any]:
    """The row of one config, from processes of its own; on ranks but the first only its outcome."""
    try:
        check(options, launch, config)
    except MegaliteError as error:
        return {"config": config, "error": "; ".join(str(error).splitlines())}
    result = folder / f"{index}.json"
    order = {
        "config": config,
        "settings": options.settings,
        "local": options.local,
        "steps": options.steps,
        "warmup": options.warmup,
        "data": options.data,
        "trace": options.trace and str(options.trace.resolve() / f"{index}-{Path(config).stem}"),
        "work": str((options.work or folder) / f"mfu-{index}"),
        "result": str(result),
    }
    if launch.rank == 0:
        print(f"{config} ...", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, _RUN, json.dumps(order)],
        env=_environment(os.environ, launch, index),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0 and launch.rank > 0:
        return {"config": config}
    if done.returncode == 0 and result.is_file():
        row: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return row
    sys.stderr.write(done.stderr)
    return {"config": config, "error": _reason(done.stderr, done.returncode)}


def check(options: argparse.Namespace, launch: Launch, path: str) -> None:
    """Raise MegaliteError for a config that cannot be measured here: in no time, without torch."""
    world_size = None if options.local else launch.world_size
    config = open_run(path, options.settings, world_size).config
    needed = Topology.of(config.parallel).world_size
    if not options.local and needed != launch.world_size:
        raise ConfigError(
            f"the layout needs {needed} processes, this is {launch.world_size}; add --local, or "
            f"start {needed} with torchrun or srun"
        )


def _environment(environ: Mapping[str, str], launch: Launch, index: int) -> dict[str, str]:
    """The variables of a process that is this rank in a world that meets at a port of its own."""
    result = dict(environ)
    if "TORCHELASTIC_RUN_ID" in environ:  # rank 0 serves the store: that of the agent is this one's
        result["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        result.pop("TORCHELASTIC_ERROR_FILE", None)
    if launch.source == "single":
        return result
    port = _FIRST_PORT + (launch.master_port * 31 + 1 + index) % _NUM_PORTS
    return result | {
        "RANK": str(launch.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": str(launch.local_rank),
        "LOCAL_WORLD_SIZE": str(launch.local_world_size),
        "MASTER_ADDR": launch.master_addr,
        "MASTER_PORT": str(port),
    }


def _reason(stderr: str, code: int) -> str:
    """The "error:" lines of a failed run, else its last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
    return "; ".join(errors) or (lines[-1] if lines else f"exit code {code}")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as markdown."""
    lines = [_line(_COLUMNS), _line(["---", "---", *["--:"] * 7, "---"])]
    return "\n".join([*lines, *(_line(_cells(row)) for row in rows)])


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        shown = row["error"].replace("|", "/")
        return [row["config"], f"failed: {shown}", *[""] * (len(_COLUMNS) - 2)]
    split = sorted(row["time_split"].items(), key=lambda item: -item[1])
    return [
        row["config"],
        row["layout"]["text"],
        str(row["world_size"]),
        f"{row['tokens_per_s_per_gpu']:.0f}",
        f"{row['tflops_per_gpu']:.4g}",
        _share(row["mfu"]),
        _share(row["mfu_causal"]),
        f"{row['memory_peak_bytes'] / 2**30:.1f}",
        f"{row['step_time_s'] * 1e3:.1f}",
        ", ".join(f"{part} {share:.0%}" for part, share in split if share >= 0.005),
    ]


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
