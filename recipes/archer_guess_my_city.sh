#!/usr/bin/env bash
# What it does stands in archer_guess_my_city.yaml; add hardware=cpu for a machine without a GPU.
exec bash "$(dirname "$0")/run.sh" archer_guess_my_city "$@"
