#!/usr/bin/env bash
# Train a real transformer in 3D on this machine: 8 processes, tp 2 x pp 2 (2 chunks) x dp 2.
# Text is the Python standard library's own source; nothing but Python packages is downloaded.
# About five minutes on two cores. Run again, it goes on from its checkpoint.
# Further arguments go to the training: bash launch/quickstart.sh log.interval=1
# MEGALITE_WORK names another folder than the repository for data/ and runs/.
set -euo pipefail
case "${1:-}" in
-h | --help)
    sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}"
    exit
    ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
setup_environment "[plots]"
mkdir -p "${MEGALITE_WORK:-$root}"
cd "${MEGALITE_WORK:-$root}"
export PATH="$venv/bin:$PATH"

run=runs/quickstart
echo
echo "1. Tokens of Python's standard library, then training: configs/quickstart.toml on 8 processes"
echo "   (GPUs are used if there are 8)."
OMP_NUM_THREADS=1 megalite train quickstart --local "$@"
echo
echo "2. A sample, drawn among the 50 likeliest tokens at temperature 0.8:"
echo
megalite generate "$run" --prompt "def read_" --tokens 96
echo
echo "3. What happened:"
megalite report "$run"
cat <<'TEXT'

What to try next
  megalite train quickstart --local --name longer train.steps=900
  megalite train quickstart --local --name serial parallel.tp=1 parallel.pp=1 \
      parallel.vpp=1 parallel.dp=1 parallel.sequence_parallel=false pipeline.schedule=1f1b
      (one process, the same loss to five digits)
  megalite train quickstart --print-config
  bash launch/test.sh
The megalite command is in .venv/bin; `source .venv/bin/activate` puts it on your path.
TEXT
