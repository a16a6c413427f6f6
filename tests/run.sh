#!/usr/bin/env bash
# Everything that is tested: bash tests/run.sh [lint|types|unit|e2e ...] (default: all); makes .venv if needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash recipes/setup.sh cpu dev docs alfworld webshop search gym textarena reasoning skyrl
export PATH=$PWD/.venv/bin:$PATH
for part in "${@:-lint types unit e2e}"; do for one in $part; do
  echo "== $one"
  case $one in
    lint) ruff check .; ruff format --check . ;;
    types) mypy --strict verl_multiturn environments ;;
    unit) pytest -m "not e2e" -n 2 --dist loadfile ;;
    # One at a time: two private Ray clusters collide on a socket of verl's.
    e2e) pytest -m e2e -v ;;
    *) echo "error: unknown part '$one'; valid: lint types unit e2e" >&2; exit 2 ;;
  esac
done; done
