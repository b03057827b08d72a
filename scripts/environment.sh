# Sourced by the other scripts: makes .venv in the repository root, with the pinned packages.
# A finished installation leaves a stamp, so that the next call starts at once and an interrupted
# one is repaired. MAXBATCH_NEWEST=1 makes .venv-newest instead, with the newest packages that
# pyproject.toml allows; to take newer ones, delete it. MAXBATCH_PYTHON names the Python to make it with.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
versions=(-c constraints.txt)
if [[ -n "${MAXBATCH_NEWEST:-}" ]]; then
  venv=.venv-newest
  versions=(--upgrade --upgrade-strategy eager)
fi
stamp="$venv/maxbatch-installed"
install_log="$venv/maxbatch-install.log"

# Prints the first Python that runs and is new enough: a name on the PATH can be a shim that fails.
find_python() {
  local name
  for name in ${MAXBATCH_PYTHON:-} python3.14 python3.13 python3.12 python3.11 python3 python; do
    if "$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
      >/dev/null 2>&1; then
      echo "$name"
      return
    fi
  done
  echo "maxbatch needs Python 3.11 or newer (with its venv module); none was found on the PATH." >&2
  return 1
}

# What was installed and where from: a moved repository must be installed again.
fingerprint() {
  echo "$1: $({ pwd; cat pyproject.toml constraints.txt; } | cksum)"
}

# Whether the package is installed with an extra; "": with any, as all bring what it needs itself.
# test-all brings what test does.
is_installed() {
  local names=("$1") name
  [[ "$1" != test ]] || names+=(test-all)
  [[ -f "$stamp" ]] && for name in "${names[@]}"; do fingerprint "$name"; done | grep -qF -f - "$stamp" \
    && "$venv/bin/python" -c '' 2>/dev/null
}

# ensure_environment EXTRA: installs the package with EXTRA (test, test-all, or "" for what trains on this
# machine's accelerators) unless that is done. What was installed before stays.
ensure_environment() {
  local extra="$1" accelerators=""
  [[ -n "$extra" || "${JAX_PLATFORMS:-}" == cpu ]] || find_accelerators
  is_installed "$extra" || install_package "$extra" "$accelerators"
}

# Sets `extra` to what GPUs or TPUs of this machine need, and `accelerators` to a sentence about them.
find_accelerators() {
  local python="$venv/bin/python"
  "$python" -c '' 2>/dev/null || python="$(find_python)"
  { read -r extra && read -r accelerators; } < <("$python" maxbatch/hardware/accelerators.py) || true
}

# install_package EXTRA SENTENCE: says the sentence first.
install_package() {
  local extra="$1" target="." others="" python
  [[ -z "$extra" ]] || target=".[$extra]"
  [[ -z "$2" ]] || echo "$2" >&2
  # A half-made or moved environment cannot be repaired by pip: make it anew.
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python="$(find_python)"
    echo "Making $venv with $("$python" --version)." >&2
    "$python" -m venv --clear "$venv"
  fi
  if is_installed ""; then
    others="$(fingerprint "" | grep -F -f - "$stamp")"
  fi
  rm -f "$stamp"
  echo "Installing maxbatch and its packages (${versions[*]}) into $venv: 1 to 5 minutes, once." >&2
  if ! "$venv/bin/python" -m pip install --disable-pip-version-check --quiet \
    "${versions[@]}" -e "$target" >"$install_log" 2>&1; then
    grep -v '^WARNING' "$install_log" | tail -n 15 >&2
    echo "The packages could not be installed (all of pip's words: $install_log)." >&2
    echo "Is there a network? Run the same command again; it continues where this one stopped." >&2
    return 1
  fi
  { [[ -z "$others" ]] || echo "$others"; fingerprint "$extra"; } >"$stamp.new"
  mv "$stamp.new" "$stamp"
}

# take_command [COMMAND] [key=value ...]: sets `command` to a line that runs maxbatch: `train`, where
# no COMMAND comes first, and base.yml, where `train` is given no config=.
take_command() {
  local name=train config=configs/base.yml argument
  if [[ "${1:-}" =~ ^[a-z_]+$ ]]; then
    name="$1"
    shift
  fi
  if [[ ! -f "maxbatch/$name.py" ]]; then
    echo "error: $name: there is no such command; for example train_rl" >&2
    return 2
  fi
  for argument in "$@"; do
    [[ "$argument" != config=* ]] || config=
  done
  command=("$venv/bin/python" -m "maxbatch.$name")
  if [[ "$name" == train && -n "$config" ]]; then
    command+=("config=$config")
  fi
  command+=("$@")
}
