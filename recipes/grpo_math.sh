#!/usr/bin/env bash
# What it does stands in grpo_math.yaml; add hardware=cpu for a machine without a GPU.
exec bash "$(dirname "$0")/run.sh" grpo_math "$@"
