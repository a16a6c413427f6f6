#!/usr/bin/env bash
# Runs a recipe: bash recipes/run.sh RECIPE [hydra overrides...]; every recipes/<name>.sh is this with a name.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
recipe=${1:?usage: bash recipes/run.sh RECIPE [hydra overrides...]}; shift
python=python
if ! python -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("verl") and u.find_spec("verl_multiturn")))' 2>/dev/null; then
  # No environment of the user's own: make ours.
  case " $* " in
    *" hardware=cpu "*) extra=cpu ;;
    *) extra=gpu
       [ -e /dev/nvidiactl ] || case " $* " in *" --help "* | *" --cfg "* | *" --dry-run "*) extra=cpu ;; *)
         echo "error: this recipe is for GPUs and none was found: add hardware=cpu for a real run on this machine with the small default model" >&2
         exit 2 ;; esac ;;
  esac
  case "$recipe" in *_alfworld | *_webshop | *_search) extra+=" ${recipe##*_}" ;; esac
  bash "$here/setup.sh" $extra
  python=$here/../.venv/bin/python
fi
exec "$python" -m verl_multiturn.main --config-name "$recipe" "$@"
