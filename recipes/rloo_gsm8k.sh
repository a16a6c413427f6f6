#!/usr/bin/env bash
# What it does stands in rloo_gsm8k.yaml; add hardware=cpu for a machine without a GPU.
exec bash "$(dirname "$0")/run.sh" rloo_gsm8k "$@"
