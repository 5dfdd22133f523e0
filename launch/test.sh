#!/usr/bin/env bash
# Linters, type checks, floors, and the test-suite. Arguments go to pytest, such as -m slow.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
setup_environment "[dev]"
cd "$root"
export PATH="$venv/bin:$PATH" OMP_NUM_THREADS=1
ruff check .
ruff format --check .
mypy
lint-imports
pytest "$@"  # not python -m: that would put kernels/ on the path as a package of its own
