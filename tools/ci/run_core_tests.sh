#!/usr/bin/env bash
# Every core mechanism, measured and gated against tools/ci/baselines.json: tools/ci/run_core_tests.sh [--fast] [--help]
# The interpreter is $PYTHON, else .venv's, else python, else python3. Children inherit the environment, PYTHONPATH included.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
for python in "${PYTHON:-.venv/bin/python}" python python3; do
    command -v "$python" >/dev/null && break
    [ -z "${PYTHON:-}" ] || { echo "run_core_tests.sh: PYTHON=$PYTHON is no program" >&2; exit 2; }
done
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" tools/ci/core_tests.py "$@"
