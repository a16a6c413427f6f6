#!/usr/bin/env bash
# What it does stands in gigpo_webshop.yaml; add hardware=cpu for a machine without a GPU.
exec bash "$(dirname "$0")/run.sh" gigpo_webshop "$@"
