# Sourced by quickstart.sh and test.sh: a virtual environment in .venv with megalite in it.
# A torch that the Python at hand already has (a GPU image) is used; else the tested one is installed.
# MEGALITE_PYTHON names another Python than python3, MEGALITE_VENV another place than .venv.

set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${MEGALITE_VENV:-$root/.venv}"

setup_environment() { # setup_environment EXTRA: "[plots]" or "[dev]"
    local extra="$1" python="${MEGALITE_PYTHON:-python3}"
    local stamp="$venv/.installed$extra"
    if [ -f "$stamp" ] && [ "$stamp" -nt "$root/pyproject.toml" ] && [ "$stamp" -nt "$root/setup.py" ]; then
        return
    fi
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "megalite needs Python 3.11 or newer; $python is $("$python" --version 2>&1)." >&2
        echo "Set MEGALITE_PYTHON to a newer one." >&2
        exit 2
    }
    local has_torch='import re, torch; v = re.findall(r"\d+", torch.__version__); exit((int(v[0]), int(v[1])) < (2, 11))'
    echo "Installing into $venv ..."
    if "$python" -c "$has_torch" 2>/dev/null; then
        "$python" -m venv --system-site-packages "$venv"
        "$venv/bin/python" -m pip install --quiet --editable "$root$extra"
    else
        "$python" -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet --requirement "$root/launch/constraints.txt"
        "$venv/bin/python" -m pip install --quiet --constraint "$root/launch/constraints.txt" \
            --editable "$root$extra"
    fi
    touch "$stamp"
}
