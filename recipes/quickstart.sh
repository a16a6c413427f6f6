#!/usr/bin/env bash
# Trains a small agent for real on this machine's CPU and shows what it learnt: set-up, warm start, GiGPO with
# verl's own trainer, a table on a fixed panel, a learning curve. Hydra overrides may follow (not multiturn.run).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash recipes/setup.sh cpu
run=runs/quickstart/$(date +%Y%m%d-%H%M%S)
.venv/bin/python -m verl_multiturn.main --config-name gigpo_frozenlake hardware=cpu \
  multiturn.run="$run" multiturn.val=frozen_lake-test multiturn.val_size=256 \
  trainer.experiment_name=quickstart trainer.test_freq=10 "$@"
.venv/bin/verl-multiturn report "$run" --panel frozen_lake-test --png "$run/learning_curve.png"
.venv/bin/verl-multiturn view "$run"
echo "recorded run: $run; open $run/view.html in a browser, the curve is $run/learning_curve.png"
