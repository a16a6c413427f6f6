#!/usr/bin/env bash
# Everything that is tested: bash tests/run.sh [lint|types|unit|e2e ...] (default: all); makes .venv if needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash recipes/setup.sh cpu dev
export PATH=$PWD/.venv/bin:$PATH
pure=(verl_multiturn/{__init__,env,base_env,load,check,laws,probe,panel,policies,exact,stats,errors}.py
  verl_multiturn/{columns,turns,returns,runs,run_files,report,cli,recipes_index}.py
  verl_multiturn/{compose,configure,tasks,demonstrations,metrics,progress}.py verl_multiturn/algorithms
  verl_multiturn/rollout/{parsing,prompts,layouts,episode,pool}.py environments/*.py)
for part in "${@:-lint types unit e2e}"; do for one in $part; do
  echo "== $one"
  case $one in
    lint) ruff check . && ruff format --check . ;;
    types) mypy --strict "${pure[@]}" ;;
    unit) pytest -m "not e2e" ;;
    # One at a time: two private Ray clusters collide on a socket of verl's.
    e2e) pytest -m e2e tests/e2e -v ;;
    *) echo "error: unknown part '$one'; valid: lint types unit e2e" >&2; exit 2 ;;
  esac
done; done
