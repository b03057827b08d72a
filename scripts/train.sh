#!/usr/bin/env bash
# Trains: scripts/train.sh [key=value ...]; --help lists the keys.
# The first call makes .venv. A config=FILE of your own replaces configs/base.yml; paths are
# relative to the repository root.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment ""

# Simulated devices allocate over a gigabyte in every step; huge pages save about a quarter of its time.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"

for argument in "$@"; do
  case "$argument" in
    config=*) exec "$venv/bin/python" -m maxbatch.train "$@" ;;
  esac
done
exec "$venv/bin/python" -m maxbatch.train config=configs/base.yml "$@"
