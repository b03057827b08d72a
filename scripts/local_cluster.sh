#!/usr/bin/env bash
# Trains in N processes on this machine: scripts/local_cluster.sh N [COMMAND] [key=value ...]. COMMAND is
# another one of maxbatch than train, such as train_rl.
# They share num_simulated_devices equally. The exit code is that of the process that fails first, or
# 0. Ctrl-C or SIGTERM is passed on to all of them, once; they end with this script however it ends.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment ""
take_command "${@:2}"
exec "$venv/bin/python" scripts/local_cluster.py "${1:-}" "${command[@]}"
