#!/usr/bin/env bash
# What it does stands in qvalue_hotpotqa.yaml; add hardware=cpu for a machine without a GPU.
exec bash "$(dirname "$0")/run.sh" qvalue_hotpotqa "$@"
