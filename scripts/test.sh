#!/usr/bin/env bash
# Runs the tests: scripts/test.sh [--all] [pytest arguments]. The first call makes .venv.
# Without --all it is the quick tier, of which tests/quick_tier.py says what it leaves out. Tests that
# are named (files, folders, file::test) run whole.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export PYTHONPATH="$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"

extras=test tier=quick_tier named=
if [[ "${1:-}" == --all ]]; then
  extras=test-all tier=
  shift
fi
for argument in "$@"; do
  [[ ! -e "${argument%%::*}" ]] || named=1
done
ensure_environment "$extras"
pytest=("$venv/bin/python" -m pytest)

# A file's tests stay in one process, where they share what they compile; the order of the files is
# that of tests/conftest.py.
# Some tests wait for processes: with two workers more than there are cores none is idle meanwhile.
cores=$(getconf _NPROCESSORS_ONLN)
export PYTEST_XDIST_AUTO_NUM_WORKERS=${PYTEST_XDIST_AUTO_NUM_WORKERS:-$((cores + 2))}
# A process of the tests that ends (an abort in native code, a test that hangs) ends the run with that
# failure: xdist would begin its file again, and can then wait for ever.
workers=(-n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0)
if [[ -n "$named" ]]; then
  exec "${pytest[@]}" "${workers[@]}" "$@"
fi
# What needs no jax runs by itself, where nobody can import it.
code=0
"${pytest[@]}" ${tier:+-p "$tier"} "${workers[@]}" tests/without_jax "$@" || code=$?
"${pytest[@]}" ${tier:+-p "$tier"} "${workers[@]}" --ignore=tests/without_jax tests "$@" || code=$?
exit "$code"
