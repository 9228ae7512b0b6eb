"""Before anything is fetched: can this machine run the demo, what will it cost, and then the installation itself.

    python3 compose/local/preflight.py install --kind local|dev --venv .venv [--starts-stack]

Run by whatever `python3` the machine has, also one that is too old: standard library only, and only syntax of Python 3.6 (so no `X | Y`, no future
import). A check that fails is one line with its remedy, and exit code 2. What was installed is remembered by digest in the environment, so that
a repeated run costs a few milliseconds.
"""
# ruff: noqa: UP006, UP035, UP045

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List, Optional, Tuple

ROOT = Path(__file__).resolve().parents[2]
PYTHON_MIN = (3, 11)
# Measured on Linux x86-64: PyTorch comes with its CUDA libraries, which are most of it.
DOWNLOAD_GB, DISK_GB, MINUTES = 3.3, 6.5, "3 to 10"
TOOLS_DOWNLOAD_GB, TOOLS_DISK_GB = 0.15, 0.4  # what tests and checks need beyond that
SPARE_DISK_GB = 1.0  # for the stack's data, logs and Kafka's jars
CACHE_DISK_GB = 16.0  # with less than this free, pip keeps no second copy of its downloads
STACK_MEMORY_GB, TRAINERS_MEMORY_GB = 1.5, 1.5  # the idle stack; the demo's four trainers
SAY_EVERY_S = 20.0  # where output is no terminal


def find_problem(
    version: Tuple[int, ...],
    has_venv: bool,
    machine: str,
    disk_free_gb: float,
    disk_needed_gb: float,
    memory_gb: Optional[float],
    memory_needed_gb: float,
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
    if memory_gb is not None and memory_gb < memory_needed_gb:
        return f"{memory_gb:.1f} GB of memory are available, {memory_needed_gb:.1f} GB are needed: close other programs"
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


def check(venv: Path, disk_needed_gb: float, memory_needed_gb: float) -> None:
    """Exit 2 with one line if this machine cannot do it."""
    import importlib.util

    newer = next((name for name in ("python3.14", "python3.13", "python3.12", "python3.11") if _runs(name)), None)
    problem = find_problem(
        version=(sys.version_info[0], sys.version_info[1]),
        has_venv=importlib.util.find_spec("venv") is not None and importlib.util.find_spec("ensurepip") is not None,
        machine=f"{platform.system()} {platform.machine()}",
        disk_free_gb=_disk_free_gb(venv),
        disk_needed_gb=disk_needed_gb,
        memory_gb=memory_available_gb(),
        memory_needed_gb=memory_needed_gb,
        newer_python=newer,
    )
    if problem:
        sys.stderr.write(f"make: {problem}\n")
        sys.exit(2)


def _disk_free_gb(path: Path) -> float:
    """Where the environment will lie, which need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(str(path)).free / 1e9


def memory_needed_gb(starts_stack: bool) -> float:
    """For the stack, unless it runs already, and for the demo's trainers; nothing where nothing is started."""
    if not starts_stack:
        return 0.0
    home = Path(os.environ.get("OPENTINKER_HOME") or os.path.expanduser("~/.opentinker"))
    try:
        os.kill(json.loads((home / "run" / "pids" / "supervisord.json").read_text())["pid"], 0)
    except (OSError, ValueError, KeyError, TypeError):
        return STACK_MEMORY_GB + TRAINERS_MEMORY_GB
    return TRAINERS_MEMORY_GB


def install(kind: str, venv: Path, starts_stack: bool) -> None:
    """Bring the environment to what the lock file says, then our package into it. Nothing happens if it is already so."""
    lock = ROOT / "requirements" / f"{kind}.txt"
    locked, ours = _digest(lock), f"{_digest(ROOT / 'pyproject.toml')} {ROOT}"
    lock_stamp, local_stamp, ours_stamp = venv / f".installed-{kind}", venv / ".installed-local", venv / ".installed-opentinker"
    missing = _read(lock_stamp) != locked
    has_most = local_stamp.exists()
    disk_gb = 0.0 if not missing else TOOLS_DOWNLOAD_GB + TOOLS_DISK_GB if has_most else DOWNLOAD_GB + DISK_GB
    check(venv, disk_needed_gb=SPARE_DISK_GB + disk_gb, memory_needed_gb=memory_needed_gb(starts_stack))
    if missing:
        began = time.time()
        _announce(kind, venv, has_most)
        _install_locked(lock, venv, total_gb=0.0 if has_most else DOWNLOAD_GB)
        lock_stamp.write_text(locked)
        if kind == "dev":  # it holds all of the other one
            local_stamp.write_text(_digest(ROOT / "requirements" / "local.txt"))
        print(f"Installed in {_minutes(time.time() - began)}.", flush=True)
    if _read(ours_stamp) != ours:
        python = str(venv / "bin" / "python")
        _run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", str(ROOT)], dict(os.environ), quiet=True)
        ours_stamp.write_text(ours)


def _announce(kind: str, venv: Path, has_most: bool) -> None:
    """What it costs, before anything is fetched."""
    mirror = "A mirror: PIP_INDEX_URL, MAVEN_REPOSITORY_URL."
    if has_most:
        what = "what tests and checks need, about 150 MB to download" if kind == "dev" else "what changed in the lock file"
        print(f"Installing into {venv}: {what}. {mirror}", flush=True)
        return
    print(
        f"Installing into {venv}:\n"
        f"  about {DOWNLOAD_GB} GB to download (PyTorch with CUDA is most of it), then 40 MB of Kafka's jars\n"
        f"  {DISK_GB} GB of disk, {DISK_GB + DOWNLOAD_GB:.0f} GB while it installs\n"
        f"  {MINUTES} minutes on a common line\n{mirror}",
        flush=True,
    )


def _install_locked(lock: Path, venv: Path, total_gb: float) -> None:
    """pip, with its downloads inside the environment: /tmp is memory on some machines, and too small for PyTorch."""
    if not (venv / "bin" / "pip").exists():  # also where making it was interrupted
        _run([sys.executable, "-m", "venv", str(venv)], dict(os.environ))
    downloads = venv / ".downloads"
    shutil.rmtree(str(downloads), ignore_errors=True)
    downloads.mkdir()
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--require-hashes", "-r", str(lock)]
    if _disk_free_gb(venv) < CACHE_DISK_GB:
        command.insert(5, "--no-cache-dir")
    try:
        _run(command, dict(os.environ, TMPDIR=str(downloads)), progress=_Progress(venv, downloads, total_gb))
    finally:
        shutil.rmtree(str(downloads), ignore_errors=True)


class _Progress:
    """What pip has done so far: one line that changes on a terminal, a line now and then in a log. `total_gb` 0: not known."""

    def __init__(self, venv: Path, downloads: Path, total_gb: float) -> None:
        self._venv = venv
        self._downloads = downloads
        self._total_gb = total_gb
        self._packages = self._count_packages()
        self._began = self._said = time.time()

    def show(self) -> None:
        now = time.time()
        if sys.stdout.isatty():
            sys.stdout.write(f"\r\033[K  {self._text(now)}")
        elif now - self._said >= SAY_EVERY_S:
            self._said = now
            sys.stdout.write(f"  {self._text(now)}\n")
        sys.stdout.flush()

    def end(self) -> None:
        if sys.stdout.isatty():
            sys.stdout.write("\r\033[K")
            sys.stdout.flush()

    def _text(self, now: float) -> str:
        unpacked = [folder for folder in _entries(self._downloads) if folder.name.startswith("pip-unpack-")]
        fetched_gb = sum(_size(path) for folder in unpacked for path in _entries(folder)) / 1e9
        of = f" of about {self._total_gb}" if self._total_gb else ""
        unpacking = "; unpacking" if self._count_packages() > self._packages else ""
        return f"{fetched_gb:.2f}{of} GB fetched{unpacking}, {_minutes(now - self._began)}"

    def _count_packages(self) -> int:
        return sum(len(_entries(folder / "site-packages")) for folder in _entries(self._venv / "lib"))


def _entries(folder: Path) -> List[Path]:
    """What a folder holds now; nothing if it is gone. pip removes folders while we look, and `Path.glob` raises then."""
    try:
        return [folder / name for name in os.listdir(str(folder))]
    except OSError:
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # moved meanwhile
        return 0


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _run(command: List[str], environ: Dict[str, str], quiet: bool = False, progress: Optional[_Progress] = None) -> None:
    """Run it, or end with one line. `quiet`: its output is shown only if it fails."""
    environment = dict(environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_ROOT_USER_ACTION="ignore")
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
    )
    output = _wait(process, progress)
    if process.returncode != 0:
        sys.stderr.write(output.decode("utf-8", "replace"))
        sys.stderr.write("make: `{}` failed; see above. A mirror can be named in PIP_INDEX_URL\n".format(" ".join(command)))
        sys.exit(1)


def _wait(process: "subprocess.Popen[bytes]", progress: Optional[_Progress]) -> bytes:
    """Until it has ended; it does not outlive us. Returns what it printed, if that was caught."""
    try:
        while True:
            try:
                return process.communicate(timeout=1 if progress else None)[0] or b""
            except subprocess.TimeoutExpired:
                if progress:
                    progress.show()
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        if progress:
            progress.end()


def main() -> None:
    parser = argparse.ArgumentParser(description="Check this machine and install OpenTinker's environment.")
    parser.add_argument("what", choices=["check", "install"])
    parser.add_argument("--kind", choices=["local", "dev"], default="local")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--starts-stack", action="store_true", help="the caller starts the stack next: it needs memory")
    arguments = parser.parse_args()
    venv = Path(os.path.abspath(str(arguments.venv)))
    try:
        if arguments.what == "check":
            check(venv, SPARE_DISK_GB + DISK_GB + DOWNLOAD_GB, memory_needed_gb(starts_stack=True))
        else:
            install(arguments.kind, venv, arguments.starts_stack)
    except KeyboardInterrupt:
        sys.stderr.write("\nmake: interrupted; the same command goes on from what is there\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
