#!/usr/bin/env bash
# Trains in N processes on this machine: scripts/local_cluster.sh N [key=value ...].
# They share num_simulated_devices equally. The exit code is that of the process that fails first, or
# 0. Ctrl-C or SIGTERM is passed on to all of them, once; they end with this script however it ends.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment ""
exec "$venv/bin/python" scripts/local_cluster.py "$@"
