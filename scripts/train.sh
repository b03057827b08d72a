#!/usr/bin/env bash
# Trains: scripts/train.sh [COMMAND] [key=value ...]; --help lists the keys.
# The first call makes .venv. COMMAND is another one of maxbatch than train, such as train_rl. A
# config=FILE of your own replaces configs/base.yml; paths are relative to the repository root.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment ""
take_command "$@"

exec "${command[@]}"
