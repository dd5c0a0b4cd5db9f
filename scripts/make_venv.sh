#!/usr/bin/env bash
# Make (or complete) a virtual environment with megatron_npu and one of its extras.
#   scripts/make_venv.sh VENV EXTRA
# An interpreter that already has torch lends it to the environment, so that a CUDA or NPU machine keeps
# the build that fits its driver; otherwise $TORCH is installed, before anything that would ask for torch.
set -euo pipefail

venv=${1:?usage: make_venv.sh VENV EXTRA}
extra=${2:?usage: make_venv.sh VENV EXTRA}
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    found=$("$python" --version 2>&1 | tail -n 1) || true # Python 2 prints its version to standard error
    echo "make_venv.sh: $python is not Python 3.10 or newer (--version: $found); set PYTHON to one that is." >&2
    exit 2
fi

has_torch() { "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; }

if [ ! -x "$venv/bin/python" ]; then
    lend=()
    if has_torch "$python"; then
        lend=(--system-site-packages)
        echo "make_venv.sh: using the torch of $python"
    fi
    "$python" -m venv "${lend[@]}" "$venv"
fi
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
has_torch "$venv/bin/python" || "${pip[@]}" "$torch"
"${pip[@]}" --editable ".[$extra]"
