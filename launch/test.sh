#!/usr/bin/env bash
# Linters, type checks, floors, and the test-suite. Arguments go to pytest, such as -m slow.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
setup_environment "[dev]"
cd "$root"
export PATH="$venv/bin:$PATH" OMP_NUM_THREADS=1
# Tests start hundreds of processes, each of which would compile the sources anew.
unset PYTHONDONTWRITEBYTECODE
ruff check .
ruff format --check .

# Tests on ranks wait for each other, and others for processes, so all run at once: those on ranks
# one after another, the rest in two processes, file by file. What runs in the background prints
# when the rest has. pytest, not python -m: that would put kernels/ on the path as a package.
# Without --default-signal bash lets whatever it starts in the background ignore Ctrl-C.
logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT
apart=(env "--default-signal=INT,QUIT")
"${apart[@]}" bash -c "mypy && lint-imports" >"$logs/types" 2>&1 &
types=$!
"${apart[@]}" pytest --ranks=only "$@" >"$logs/ranks" 2>&1 &
ranks=$!
single_code=0 types_code=0 ranks_code=0
pytest --ranks=none --numprocesses=2 --dist=loadfile --no-loadscope-reorder "$@" || single_code=$?
wait "$ranks" || ranks_code=$?
cat "$logs/ranks"
wait "$types" || types_code=$?
cat "$logs/types"

# pytest answers 5 when nothing was selected, which may be so in one of the two parts.
[ "$types_code" = 0 ] || exit "$types_code"
[ "$single_code" != 5 ] || exit "$ranks_code"
[ "$single_code" = 0 ] || exit "$single_code"
[ "$ranks_code" = 5 ] || exit "$ranks_code"
