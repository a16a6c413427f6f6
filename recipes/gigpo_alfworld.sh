#!/usr/bin/env bash
# What it does stands in gigpo_alfworld.yaml; add hardware=cpu for a machine without a GPU.
exec bash "$(dirname "$0")/run.sh" gigpo_alfworld "$@"
