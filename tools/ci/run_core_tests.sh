#!/usr/bin/env bash
# Every core mechanism, measured and gated against tools/ci/baselines.json: tools/ci/run_core_tests.sh [--fast] [--help]
# PYTHON=<interpreter> overrides .venv's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || command -v "$python" >/dev/null || python=python3
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" tools/ci/core_tests.py "$@"
