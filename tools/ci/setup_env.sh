#!/usr/bin/env bash
# Makes .venv and installs this package into it: tools/ci/setup_env.sh demo|tests|dev
# With "doors": makes .venv/doors, which sees everything in .venv and has the trainers of tests/doors beside it.
#
# An interpreter that already has a CUDA build of PyTorch is used as it is: .venv sees its packages, and neither torch
# nor paddle is downloaded. Any other machine gets the CPU packages pinned in pyproject.toml.
# PYTHON=<interpreter> overrides the search. Leaves .venv/.framework (which framework the demo trains on) and
# .venv/.installed-<set>, the stamp the Makefile compares with pyproject.toml. Its last line, where there is a GPU, says what the
# GPU engines lack in .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=.venv
venv_python=$venv/bin/python

fail() {
    echo "setup_env: $*" >&2
    exit 1
}

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

has_cuda_torch() {
    "$1" -c 'import torch; assert torch.version.cuda' 2>/dev/null
}

# An interpreter with CUDA torch wins, then the first supported one.
choose_python() {
    local candidate first=""
    if [ -n "${PYTHON:-}" ]; then
        supported "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.11 or 3.12"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3; do
        supported "$candidate" || continue
        if has_cuda_torch "$candidate"; then
            echo "$candidate"
            return
        fi
        first=${first:-$candidate}
    done
    [ -n "$first" ] || fail "needs Python 3.11 or 3.12: none of python3.11, python3.12, python3 is one (set PYTHON=<interpreter>)"
    echo "$first"
}

# Some distributions ship venv without its bundled pip: then the interpreter's own pip fills the environment.
create_venv() {
    local python=$1 flags=(--clear)
    shift
    flags+=("$@")
    "$python" -m venv "${flags[@]}" "$venv" >/dev/null 2>&1 && return
    "$python" -m venv "${flags[@]}" --without-pip "$venv" || fail "$python cannot make a virtual environment"
    "$venv_python" -m pip --version >/dev/null 2>&1 || "$python" -m pip --python "$venv_python" install pip ||
        fail "$python has no pip"
}

make_environment() {
    local python
    python=$(choose_python)
    if has_cuda_torch "$python"; then
        create_venv "$python" --system-site-packages
        # An environment made from inside another one sees the base interpreter's packages, not that one's.
        "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$(site_packages)/host_packages.pth"
        # Python 3.11 bundles a setuptools too old to build this package; without it the host's is found.
        "$venv_python" -m pip uninstall --quiet --yes setuptools >/dev/null 2>&1 || true
        echo torch >"$venv/.framework"
    else
        create_venv "$python"
        echo paddle >"$venv/.framework"
    fi
}

site_packages() {
    "$venv_python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# Modules of a set that the environment cannot import, on one line.
missing_modules() {
    "$venv_python" - "$@" <<'PY'
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))
PY
}

install() {
    "$venv_python" -m pip install ${CI:+--quiet} --disable-pip-version-check "$@"
}

# Nothing to download: install without an index, or, where pip cannot build offline, put the checkout on the module path.
link_checkout() {
    install --quiet --no-deps --no-build-isolation --no-index -e . 2>/dev/null && return
    echo "setup_env: pip cannot build offline here; linking the checkout instead (run it as: $venv_python -m sonicmoe)"
    pwd >"$(site_packages)/sonicmoe_checkout.pth"
}

install_beside_host_torch() {
    local extras modules=(numpy click rich platformdirs filelock matplotlib) missing
    case $1 in
        demo) extras=plots ;;
        tests) extras=plots,test && modules+=(pytest xdist hypothesis) ;;
        dev) extras=plots,test,lint && modules+=(pytest xdist hypothesis ruff mypy) ;;
    esac
    missing=$(missing_modules "${modules[@]}")
    if [ -z "$missing" ]; then
        link_checkout
    else
        install -e ".[$extras]" || fail "could not download what '$1' needs and this Python lacks: $missing"
    fi
}

install_everything() {
    case $1 in
        demo) install -e ".[paddle,plots]" ;;
        tests | dev) install -e ".[dev]" ;;
    esac
}

# The trainers ask for older versions of what .venv has (huggingface_hub), and .venv must not move. An environment of
# their own comes first on the module path, and takes torch and all the rest from .venv.
make_doors() {
    local doors=$venv/doors packages
    packages=$("$venv_python" -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["doors"])')
    [ "$(cat "$doors/.installed" 2>/dev/null)" = "$packages" ] && return
    "$venv_python" -m venv --clear --without-pip "$doors" || fail "cannot make $doors"
    printf 'import site; site.addsitedir("%s")\n' "$(site_packages)" >"$doors/lib/python3.$("$venv_python" -c 'import sys
print(sys.version_info.minor)')/site-packages/below.pth"
    # shellcheck disable=SC2086  # one word for each package
    "$doors/bin/python" -m pip install --quiet --disable-pip-version-check $packages || fail "could not download: $packages"
    echo "$packages" >"$doors/.installed"
}

case ${1:-} in
    demo | tests | dev) ;;
    doors)
        [ -f "$venv/.framework" ] || fail "make .venv first: tools/ci/setup_env.sh tests"
        make_doors
        exit
        ;;
    *) fail "usage: tools/ci/setup_env.sh demo|tests|dev|doors" ;;
esac
[ -f "$venv/.framework" ] || make_environment
if [ "$(cat "$venv/.framework")" = torch ]; then
    install_beside_host_torch "$1"
else
    install_everything "$1"
fi
# Each set contains the ones before it.
for set in demo tests dev; do
    touch "$venv/.installed-$set"
    [ "$set" = "$1" ] && break
done
# The packages of these sets run the reference engine.
echo "setup_env: on a machine with a GPU, \`$venv/bin/sonicmoe doctor\` says what its engines lack"
