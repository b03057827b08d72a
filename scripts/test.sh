#!/usr/bin/env bash
# Runs the tests: scripts/test.sh [pytest arguments]. The first call makes .venv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment test
# A file's tests stay in one process, where they share what they compile; the order of the files is
# that of tests/conftest.py.
# Some tests wait for processes: with one worker more than there are cores none is idle meanwhile.
cores=$(getconf _NPROCESSORS_ONLN)
export PYTEST_XDIST_AUTO_NUM_WORKERS=${PYTEST_XDIST_AUTO_NUM_WORKERS:-$((cores + 1))}
exec "$venv/bin/python" -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
