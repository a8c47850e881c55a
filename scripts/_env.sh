# Shared by the scripts of this folder; sourced, not run.
#
# `ensure_installed runtime|dev` makes .venv hold chatserve and what it needs, and does nothing when it does
# already. Variables: PYTHON (interpreter to use), CHATSERVE_VENV (instead of .venv), CHATSERVE_ACCEPT_CUDA=1 (see
# scripts/_download_cost.py). Everything said goes to stderr, so that a script's output stays its own.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${CHATSERVE_VENV:-$ROOT/.venv}"

say() { printf '==> %s\n' "$*" >&2; }

fail() {
    printf 'Error: %s\n' "$*" >&2
    exit 1
}

has_nvidia_gpu() { [[ -e /dev/nvidia0 || -e /proc/driver/nvidia/version ]] || nvidia-smi -L >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
        if [[ -n "$candidate" ]] &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "chatserve needs Python 3.11 or newer, and none was found. Install one, or name it: PYTHON=/path/to/python3 $0"
}

create_venv() {
    local python
    python="$(find_python)"
    say "Creating $VENV with $("$python" --version)"
    "$python" -m venv "$VENV" ||
        fail "python -m venv failed. On Debian and Ubuntu: apt-get install python3-venv. Then remove $VENV and try again."
}

# What an installation depends on; printed as one hash.
fingerprint() {
    {
        cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt"
        "$VENV/bin/python" --version
        printf '%s\n' "$ROOT"
    } | "$VENV/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

ensure_installed() {
    local kind="$1" target="$ROOT" stamp constraints=()
    "$VENV/bin/python" -c '' >/dev/null 2>&1 || create_venv
    stamp="$(fingerprint)"
    # What the tests need includes what a server needs.
    if [[ "$(cat "$VENV/.installed-$kind" 2>/dev/null)" == "$stamp" ||
        "$(cat "$VENV/.installed-dev" 2>/dev/null)" == "$stamp" ]]; then
        return
    fi
    [[ "$kind" == dev ]] && target="$ROOT[dev]"
    local pip=("$VENV/bin/python" -m pip --disable-pip-version-check)
    "$VENV/bin/python" -c 'import pip, sys; sys.exit(tuple(map(int, pip.__version__.split(".")[:2])) < (23, 2))' || {
        say "Upgrading pip, which is too old to say beforehand what it would download"
        "${pip[@]}" install --quiet --upgrade pip
    }
    if ! has_nvidia_gpu; then
        constraints=(-c "$ROOT/constraints.txt")
        say "Resolving what has to be downloaded"
        "${pip[@]}" install --quiet --dry-run --report "$VENV/.report.json" ${constraints[@]+"${constraints[@]}"} -e "$target"
        "$VENV/bin/python" "$ROOT/scripts/_download_cost.py" "$VENV/.report.json" || exit 1
    fi
    say "Installing chatserve ($kind) into $VENV"
    "${pip[@]}" install ${constraints[@]+"${constraints[@]}"} -e "$target" >&2
    printf '%s\n' "$stamp" >"$VENV/.installed-$kind"
}
