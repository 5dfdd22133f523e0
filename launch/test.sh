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

# Tests on ranks fill the machine one after another; the others go in two processes, file by file.
# pytest (not python -m: that would put kernels/ on the path as a package of its own) answers 5 when
# nothing was selected, which may be so in one of the two parts.
failed=0 selected=0
for part in "--ranks=none --numprocesses=2 --dist=loadfile --no-loadscope-reorder" "--ranks=only"; do
    code=0
    pytest $part "$@" || code=$?
    [ "$code" = 5 ] || selected=1
    [ "$code" = 0 ] || [ "$code" = 5 ] || failed="$code"
done
[ "$selected" = 1 ] || failed=5
exit "$failed"
