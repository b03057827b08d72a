#!/usr/bin/env bash
# Runs the tests: scripts/test.sh [pytest arguments]. The first call makes .venv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment test
exec "$venv/bin/python" -m pytest "$@"
