#!/usr/bin/env bash
# What it does stands in gigpo_search.yaml; add hardware=cpu for a machine without a GPU.
exec bash "$(dirname "$0")/run.sh" gigpo_search "$@"
