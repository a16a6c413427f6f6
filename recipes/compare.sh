#!/usr/bin/env bash
# GRPO, PPO, GiGPO, StarPO, StarPO-S, VinePPO, ArCHer and Q-guided agents on FrozenLake and Sokoban with the small model, three
# seeds, on two cores: prints the plan with its hours, then trains what is missing, one run after another (at most
# $HOURS, default 6; the same command goes on), plays the test panel once per run, and writes table and curves.
# bash recipes/compare.sh --dry-run prints the plan only; other arguments go to verl-multiturn table (--seeds 1,2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=${RUNS:-runs/compare}
out=${OUT:-$root}
dry=no
[ "${1:-}" = --dry-run ] && { dry=yes; shift; }
if python -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("verl") and u.find_spec("verl_multiturn")))' 2>/dev/null; then
  python=python
else
  bash recipes/setup.sh cpu
  python=$PWD/.venv/bin/python
fi
table=("$python" -m verl_multiturn.cli table compare --root "$root")
if [ "$dry" = yes ]; then
  exec "${table[@]}" --launch "$@"
fi
mkdir -p "$root" "$out"
code=0
"${table[@]}" --launch=run --hours "${HOURS:-6}" "$@" || code=$?
"${table[@]}" --equal --runs --against GRPO
"${table[@]}" --equal --runs --against GRPO --format markdown --out "$out/table.md" --png "$out/curves.png"
"${table[@]}" --format csv --out "$out/table.csv"
exit "$code"
