#!/usr/bin/env bash
# Runs the tests: scripts/test.sh [pytest arguments]. The first call makes .venv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment test
# A file's tests stay in one process, where they share what they compile; the order of the files is
# that of tests/conftest.py.
exec "$venv/bin/python" -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
