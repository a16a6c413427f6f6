#!/usr/bin/env bash
# What it does stands in rloo_math.yaml; add hardware=cpu for a machine without a GPU.
exec bash "$(dirname "$0")/run.sh" rloo_math "$@"
