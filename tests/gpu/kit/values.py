"""The command line on a device that has values and is not the CPU: `values GUARD VALUES COMMANDS`.

The device is cuda:0 in the host's memory (`values.cpp`). COMMANDS is JSON: lists of arguments of
`megalite`, run one after another in this process. Ends with the code of the first that fails.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.gpu.kit import shim


def main() -> None:
    shim.load(Path(sys.argv[1]))
    import torch

    torch.ops.load_library(sys.argv[2])
    commands = json.loads(sys.argv[3])
    from tests.gpu.kit.device import pretend_with_values

    pretend_with_values()
    from megalite.__main__ import main as megalite

    for command in commands:
        sys.argv = ["megalite", *command]
        try:
            megalite()
        except SystemExit as leaving:
            if leaving.code:
                raise


if __name__ == "__main__":
    main()
