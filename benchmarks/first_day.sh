#!/usr/bin/env bash
# Everything that is worth knowing about megalite on one node of GPUs, in one archive to send back.
#
#   bash benchmarks/first_day.sh [OPTION ...]
#
#   --gpus N              GPUs to use: 2 or a multiple of 4 (default 8)
#   --out FOLDER          new folder for the results (default first-day-HOST-TIME here)
#   --parts LIST          only these parts, comma-separated
#   --limit PART=SECONDS  another time limit of a part; may be repeated
#   --config FILE         the run whose steps are measured (default configs/runs/llama-8b-64gpu.toml)
#   --dry                 on 2 processes of the CPU, tiny: shows only that the script works
#
# Parts, in order: versions, doctor, bandwidth, gate, parity, step-3d, step-dp, step-tp. Each has a
# log and a time limit; one that fails or exceeds its limit is recorded, and the next one runs. The
# last line printed is the path of the archive. The exit code is 0 if every part succeeded, 1 if one
# did not, 2 if nothing could start, 130 after Ctrl-C.
#
# MEGALITE_VENV   virtual environment with megalite; default: .venv of the repository if it is there.
set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
parts=(versions doctor bandwidth gate parity step-3d step-dp step-tp)
declare -A limit_s=(
    [versions]=120 [doctor]=120 [bandwidth]=300 [gate]=600 [parity]=900
    [step-3d]=900 [step-dp]=900 [step-tp]=900
)
gpus="" out="" chosen="" dry="" config=""
while [ $# -gt 0 ]; do
    case "$1" in
    --gpus | --out | --parts | --limit | --config)
        [ $# -gt 1 ] || fail "$1 needs a value; see --help"
        case "$1" in
        --gpus) gpus="$2" ;;
        --out) out="$2" ;;
        --parts) chosen="$2" ;;
        --config) config="$2" ;;
        --limit)
            [[ "$2" =~ ^([a-z0-9-]+)=([1-9][0-9]*)$ && -n "${limit_s[${BASH_REMATCH[1]}]:-}" ]] ||
                fail "--limit $2: give PART=SECONDS, with a part of ${parts[*]}"
            limit_s[${BASH_REMATCH[1]}]="${BASH_REMATCH[2]}"
            ;;
        esac
        shift 2
        ;;
    --dry)
        dry=1
        shift
        ;;
    -h | --help)
        sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit
        ;;
    *) fail "no option $1; see --help" ;;
    esac
done

# --- what is run, on what ---------------------------------------------------------------------------

gpus="${gpus:-$([ -z "$dry" ] && echo 8 || echo 2)}"
[[ "$gpus" = 2 || ("$gpus" =~ ^[1-9][0-9]*$ && $((gpus % 4)) = 0) ]] ||
    fail "--gpus $gpus; allowed are 2 and multiples of 4"
if [ -n "$chosen" ]; then
    IFS=, read -ra wanted <<<"$chosen"
    for part in "${wanted[@]}"; do
        [ -n "${limit_s[$part]:-}" ] || fail "no part $part; there are ${parts[*]}"
    done
fi
venv="${MEGALITE_VENV:-$root/.venv}"
[ ! -d "$venv/bin" ] || PATH="$(cd "$venv/bin" && pwd):$PATH"
export PATH
for program in megalite python torchrun; do
    command -v "$program" >/dev/null || fail "$program is not on PATH; set MEGALITE_VENV"
done
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

short="parallel.vpp=1 pipeline.schedule=1f1b eval.interval=0"
if [ "$gpus" = 2 ]; then
    mixed="parallel.tp=1 parallel.pp=2 parallel.dp=1 parallel.sequence_parallel=false"
else
    mixed="parallel.tp=2 parallel.pp=2 parallel.dp=$((gpus / 4)) parallel.sequence_parallel=true"
fi
replicas="parallel.tp=1 parallel.pp=1 parallel.dp=$gpus parallel.sequence_parallel=false"
tensor="parallel.tp=$gpus parallel.pp=1 parallel.dp=1 parallel.sequence_parallel=true"
if [ -n "$dry" ]; then
    export CUDA_VISIBLE_DEVICES=""
    config="${config:-$root/configs/quickstart.toml}"
    bandwidth=(--mib 0.01 --repeats 2)
    gate=(--dry --parts "gradients,nccl")
    small="model.num_layers=2 data.seq_length=16 train.global_batch=$gpus train.micro_batch=1"
    parity="$small" parity_options=(--dtypes float32 --steps 2)
    steps="$small" replicas_memory="" step_options=(--warmup 0 --steps 1) recorded=1
else
    # Widths of the 8B model, and few layers, so that one GPU holds them with all states in float32.
    config="${config:-$root/configs/runs/llama-8b-64gpu.toml}"
    bandwidth=() gate=()
    parity="model.num_layers=4 model.vocab_size=32000 data.seq_length=2048 train.global_batch=$gpus"
    parity_options=()
    # Whole replicas fit on 80 GB with recomputation and the loss in chunks.
    steps="train.global_batch=$((4 * gpus))"
    replicas_memory="optimizer.zero=1 train.recompute=full train.loss_chunk_tokens=2048"
    step_options=(--warmup 3 --steps 5) recorded=5
fi
[ -f "$config" ] || fail "no file $config"
config="$(realpath "$config")"

# --- the folder, and running a part ------------------------------------------------------------------

out="$(realpath -m "${out:-first-day-$(hostname)-$(date +%Y%m%d-%H%M%S)}")"
[ ! -e "$out" ] || fail "$out exists; name a new folder"
mkdir -p "$out"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$root"

child="" interrupted=""
# shellcheck disable=SC2317 # a trap calls it
interrupt() {
    interrupted=1
    [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true
}
trap interrupt INT TERM HUP

failed=0
run_part() { # run_part PART COMMAND...: with its time limit; records how it ended
    local part="$1" code=0 began="$SECONDS" result=ok
    shift
    [[ -z "$chosen" || ",$chosen," == *",$part,"* ]] || return 0
    [ -z "$interrupted" ] || return 0
    echo "$part: at most ${limit_s[$part]} s"
    timeout --kill-after=30 "${limit_s[$part]}" "$@" >"$out/$part.log" 2>&1 &
    child=$!
    wait "$child" || code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ended the wait, not the part
        wait "$child" || code=$?
    done
    child=""
    local seconds=$((SECONDS - began))
    if [ -n "$interrupted" ]; then
        result=interrupted
    elif [ "$code" = 124 ] || { [ "$code" = 137 ] && [ "$seconds" -ge "${limit_s[$part]}" ]; }; then
        result="over its limit"
    elif [ "$code" != 0 ]; then
        result=failed
    fi
    [ "$result" = ok ] || failed=1
    printf '{"part": "%s", "result": "%s", "code": %d, "seconds": %d, "limit_s": %d}\n' \
        "$part" "$result" "$code" "$seconds" "${limit_s[$part]}" >>"$out/parts.jsonl"
    echo "$part: $result, $seconds s"
}

# shellcheck disable=SC2317 # `bash -c` calls it
versions() { # all of it, whatever is missing
    local code=0
    nvidia-smi || code=1
    nvidia-smi topo -m || code=1
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit \
        --format=csv || code=1
    python - <<'PYTHON' || code=1
import importlib.metadata, platform, torch
print("python", platform.python_version(), "torch", torch.__version__, "cuda", torch.version.cuda)
print("cudnn", torch.backends.cudnn.version())
if torch.cuda.is_available():
    print("nccl", ".".join(map(str, torch.cuda.nccl.version())))
found = {(package.name, package.version) for package in importlib.metadata.distributions()}
print(*(f"{name}=={version}" for name, version in sorted(found)), sep="\n")
PYTHON
    megalite version || code=1
    echo "commit $(git rev-parse HEAD 2>/dev/null || echo unknown)"
    uname -a
    lscpu || true
    # Only what steers the libraries: other variables may hold secrets.
    env | grep -E '^(CUDA|NCCL|OMP|TORCH|TRITON|PYTORCH)_[A-Z_]*=' | sort || true
    return "$code"
}
export -f versions

measure() { # measure PART SETTINGS: steps of the config at one layout, with a trace of the last
    local settings
    IFS=' ' read -ra settings <<<"$short $steps $2"
    run_part "$1" python benchmarks/mfu.py "$config" "${settings[@]}" --local "${step_options[@]}" \
        --work "$work/$1" --trace "$out/traces-$1" --output "$out/steps.jsonl"
    # The records of the run are small: every step, and the time line of the pipeline.
    [ ! -d "$work/$1" ] || (cd "$work" && find "$1" -name '*.json*' -exec cp --parents -t "$out" {} +)
}

# --- the parts ---------------------------------------------------------------------------------------

run_part versions bash -c versions
run_part doctor megalite doctor --out "$work"
run_part bandwidth torchrun --standalone --nproc-per-node="$gpus" benchmarks/bandwidth.py \
    "${bandwidth[@]}" --output "$out/bandwidth.jsonl"
run_part gate python -m benchmarks.gpu_gate "${gate[@]}" --output "$out/gate.jsonl"
IFS=' ' read -ra settings <<<"$short $parity $mixed"
run_part parity python -m benchmarks.layout_losses "$config" "${settings[@]}" \
    "${parity_options[@]}" --output "$out/parity.jsonl"
measure step-3d "$mixed pipeline.trace_step=$recorded"
measure step-dp "$replicas $replicas_memory"
measure step-tp "$tensor"

# --- the archive -------------------------------------------------------------------------------------

tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
[ ! -f "$out/parts.jsonl" ] || cat "$out/parts.jsonl"
echo "$out.tar.gz"
[ -z "$interrupted" ] || exit 130
exit "$failed"
