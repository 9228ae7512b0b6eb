"""Before anything is fetched: can this machine run the demo, what will it cost, and then the installation itself.

    python3 compose/local/preflight.py install --kind local|dev --venv .venv

Run by whatever `python3` the machine has, also one that is too old: standard library only, and only syntax of Python 3.6 (so no `X | Y`, no future
import). A check that fails is one line with its remedy, and exit code 2. What was installed is remembered by digest in the environment, so that
a repeated run costs a few milliseconds.
"""
# ruff: noqa: UP006, UP035, UP045

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import List, Optional, Tuple

ROOT = Path(__file__).resolve().parents[2]
PYTHON_MIN = (3, 11)
# Measured on Linux x86-64: PyTorch comes with its CUDA libraries, which are most of it.
DOWNLOAD_GB, DISK_GB, MINUTES = 3.4, 6.5, "3 to 10"
SPARE_DISK_GB = 1.0  # for the stack's data, logs and Kafka's jars
MEMORY_MIN_GB = 3.0  # 1.5 the idle stack, 1.2 four trainers


def find_problem(
    version: Tuple[int, ...],
    has_venv: bool,
    machine: str,
    disk_free_gb: float,
    disk_needed_gb: float,
    memory_gb: Optional[float],
    newer_python: Optional[str],
) -> Optional[str]:
    """The first thing in the way, as one line with its remedy; None if nothing is."""
    if tuple(version[:2]) < PYTHON_MIN:
        remedy = (
            f"run `make PYTHON={newer_python} ...`" if newer_python else "install Python 3.11 or newer and name it with `make PYTHON=python3.11 ...`"
        )
        return f"Python {version[0]}.{version[1]} is too old, 3.11 is needed: {remedy}"
    if not has_venv:
        return f"Python's venv module is missing: `apt-get install python{version[0]}.{version[1]}-venv`, or your system's package of that name"
    if machine not in ("Linux x86_64", "Linux aarch64"):
        return f"{machine} is not supported by the embedded stack (Linux on x86-64 or arm64 is): use the Docker Compose files instead"
    if disk_free_gb < disk_needed_gb:
        return f"{disk_free_gb:.1f} GB of disk are free, {disk_needed_gb:.1f} GB are needed: free some, or put the environment elsewhere with `make VENV=/path ...`"
    if memory_gb is not None and memory_gb < MEMORY_MIN_GB:
        return f"{memory_gb:.1f} GB of memory are available, {MEMORY_MIN_GB:.1f} GB are needed: close other programs"
    return None


def _runs(name: str) -> bool:
    """Whether that Python really starts: version managers leave names on the path that only complain."""
    with open(os.devnull, "w") as nowhere:
        return shutil.which(name) is not None and subprocess.call([name, "-c", ""], stdout=nowhere, stderr=nowhere) == 0


def memory_available_gb() -> Optional[float]:
    """What the kernel says is available, or what this container is limited to if that is less."""
    found: List[float] = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.extend(int(line.split()[1]) / 1e6 for line in lines if line.startswith("MemAvailable:"))
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit.isdigit():
            found.append(int(limit) / 1e9)
    except OSError:
        pass
    return min(found) if found else None


def check(to_install: bool) -> None:
    """Exit 2 with one line if this machine cannot do it."""
    import importlib.util

    newer = next((name for name in ("python3.14", "python3.13", "python3.12", "python3.11") if _runs(name)), None)
    problem = find_problem(
        version=(sys.version_info[0], sys.version_info[1]),
        has_venv=importlib.util.find_spec("venv") is not None and importlib.util.find_spec("ensurepip") is not None,
        machine=f"{platform.system()} {platform.machine()}",
        disk_free_gb=shutil.disk_usage(str(ROOT)).free / 1e9,
        disk_needed_gb=SPARE_DISK_GB + (DISK_GB if to_install else 0),
        memory_gb=memory_available_gb(),
        newer_python=newer,
    )
    if problem:
        sys.stderr.write(f"make: {problem}\n")
        sys.exit(2)


def install(kind: str, venv: Path) -> None:
    """Bring the environment to what the lock file says, then our package into it. Nothing happens if it is already so."""
    lock = ROOT / "requirements" / f"{kind}.txt"
    locked = _digest(lock)
    ours = _digest(ROOT / "pyproject.toml")
    lock_stamp, ours_stamp = venv / f".installed-{kind}", venv / ".installed-opentinker"
    missing = _read(lock_stamp) != locked
    check(to_install=missing and not (venv / "bin" / "python").exists())
    if missing:
        print(
            f"Installing into {venv}: about {DOWNLOAD_GB} GB to download (PyTorch with CUDA is most of it), {DISK_GB} GB of disk, "
            f"{MINUTES} minutes on a common line. Then Kafka's jars, 40 MB. A mirror: PIP_INDEX_URL, MAVEN_REPOSITORY_URL.",
            flush=True,
        )
        if not (venv / "bin" / "python").exists():
            _run([sys.executable, "-m", "venv", str(venv)])
        _run([str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--require-hashes", "-r", str(lock)])
        lock_stamp.write_text(locked)
        if kind == "dev":  # it holds all of the other one
            (venv / ".installed-local").write_text(_digest(ROOT / "requirements" / "local.txt"))
    if _read(ours_stamp) != ours:
        _run([str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", str(ROOT)], quiet=True)
        ours_stamp.write_text(ours)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _run(command: List[str], quiet: bool = False) -> None:
    """Run it, or end with one line. `quiet`: its output is shown only if it fails."""
    environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_ROOT_USER_ACTION="ignore")
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE if quiet else None, stderr=subprocess.STDOUT if quiet else None, check=False
    )
    if result.returncode != 0:
        sys.stderr.write((result.stdout or b"").decode("utf-8", "replace"))
        sys.stderr.write("make: `{}` failed; see above. A mirror can be named in PIP_INDEX_URL\n".format(" ".join(command)))
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check this machine and install OpenTinker's environment.")
    parser.add_argument("what", choices=["check", "install"])
    parser.add_argument("--kind", choices=["local", "dev"], default="local")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    arguments = parser.parse_args()
    if arguments.what == "check":
        check(to_install=True)
    else:
        install(arguments.kind, arguments.venv.absolute())


if __name__ == "__main__":
    main()
