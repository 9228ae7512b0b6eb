"""What is said before anything is fetched."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from opentinker.compose.local import preflight
from opentinker.compose.local.preflight import find_problem

_ROOT = Path(__file__).resolve().parents[2]
_FINE: dict[str, Any] = {
    "version": (3, 11, 4),
    "has_venv": True,
    "machine": "Linux x86_64",
    "disk_free_gb": 20.0,
    "disk_needed_gb": 7.5,
    "memory_gb": 8.0,
    "memory_needed_gb": 3.0,
    "newer_python": None,
}


def test_nothing_is_said_where_all_is_well() -> None:
    assert find_problem(**_FINE) is None
    assert find_problem(**(_FINE | {"memory_gb": None})) is None
    assert find_problem(**(_FINE | {"memory_gb": 0.2, "memory_needed_gb": 0.0})) is None, "what starts nothing needs none: `make down` least of all"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": (3, 9, 2)}, "Python 3.9 is too old, 3.11 is needed: install Python 3.11"),
        ({"version": (3, 9, 2), "newer_python": "python3.12"}, "run `make PYTHON=python3.12"),
        ({"has_venv": False}, "apt-get install python3.11-venv"),
        ({"machine": "Darwin arm64"}, "Docker Compose"),
        ({"disk_free_gb": 2.0}, "2.0 GB of disk are free, 7.5 GB are needed"),
        ({"memory_gb": 1.0}, "1.0 GB of memory are available"),
    ],
)
def test_each_problem_is_one_line_with_its_remedy(change: dict[str, Any], words: str) -> None:
    problem = find_problem(**(_FINE | change))
    assert problem is not None
    assert words in problem
    assert "\n" not in problem


@pytest.mark.parametrize("version", ["3.6", "3.8", "3.9", "3.10"])
def test_an_older_python_prints_the_line_and_exits_2(version: str) -> None:
    older = _older_python(version)
    if older is None:
        pytest.skip(f"no Python {version} here")
    script = _ROOT / "compose" / "local" / "preflight.py"
    result = subprocess.run([older, str(script), "install", "--kind", "local", "--venv", "/nonexistent"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert re.fullmatch(rf"make: Python {re.escape(version)} is too old, 3\.11 is needed: .*\n", result.stderr)


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        ("preflight._disk_free_gb = lambda path: 3.0", "3.0 GB of disk are free"),
        ("preflight.memory_available_gb = lambda: 1.0", "1.0 GB of memory are available, 3.0 GB are needed"),
        ("preflight.platform.system = lambda: 'Darwin'", "Darwin"),
        ("sys.modules['ensurepip'] = None; importlib.util.find_spec = lambda name: None", "venv module is missing"),
    ],
)
def test_a_machine_that_cannot_do_it_prints_one_line_and_exits_2_before_anything_is_made(lacking: str, words: str, tmp_path: Path) -> None:
    arguments = ["preflight.py", "install", "--kind", "local", "--starts-stack", "--venv", str(tmp_path / "venv")]
    code = f"import sys, importlib.util; sys.path.insert(0, 'compose/local'); import preflight; {lacking}; sys.argv = {arguments}; preflight.main()"
    environment = {**os.environ, "OPENTINKER_HOME": str(tmp_path / "home")}
    result = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert re.fullmatch(rf"make: .*{re.escape(words)}.*\n", result.stderr)
    assert result.stdout == ""
    assert not (tmp_path / "venv").exists()


def test_progress_counts_what_pip_has_fetched_and_says_when_it_unpacks(tmp_path: Path) -> None:
    packages, fetched = tmp_path / "lib" / "python3.11" / "site-packages", tmp_path / "downloads" / "pip-unpack-a"
    packages.mkdir(parents=True)
    fetched.mkdir(parents=True)
    progress = preflight._Progress(tmp_path, tmp_path / "downloads", 3.4)
    with (fetched / "torch.whl").open("wb") as file:
        file.truncate(1_230_000_000)
    assert progress._text(progress._began + 75) == "1.23 of about 3.4 GB fetched, 1 min 15 s"
    (packages / "torch").mkdir()
    assert progress._text(progress._began + 8) == "1.23 of about 3.4 GB fetched; unpacking, 8 s"


def test_memory_is_asked_for_only_where_a_stack_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENTINKER_HOME", str(tmp_path))
    assert preflight.memory_needed_gb(starts_stack=False) == 0
    assert preflight.memory_needed_gb(starts_stack=True) == 3.0
    record = tmp_path / "run" / "pids" / "supervisord.json"
    record.parent.mkdir(parents=True)
    record.write_text(f'{{"pid": {os.getpid()}}}')
    assert preflight.memory_needed_gb(starts_stack=True) == 1.5, "the stack runs already"


def _older_python(version: str) -> str | None:
    candidates = [f"/usr/bin/python{version}", *map(str, Path(os.path.expanduser("~/.pyenv/versions")).glob(f"{version}.*/bin/python"))]
    return next((candidate for candidate in candidates if Path(candidate).exists()), None)


def test_help_of_the_stack_imports_no_heavy_library() -> None:
    code = "import sys, opentinker.compose.local.cli; print([n for n in ('aiokafka', 'pydantic', 'rich', 'aioboto3', 'asyncpg', 'torch') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("kind", ["local", "dev"])
def test_lock_files_pin_everything_by_digest_and_name_no_index(kind: str) -> None:
    text = (_ROOT / "requirements" / f"{kind}.txt").read_text()
    requirements = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    assert requirements
    assert all(re.match(r"[a-z0-9._-]+(\[[a-z0-9,._-]+\])?==\S+", line) for line in requirements)
    assert not re.search(r"--(extra-)?index|--find-links|https?://|file:", text)
    for block in re.split(r"\n(?=\S)", text.strip()):
        assert "--hash=sha256:" in block, block.splitlines()[0]


def test_every_dependency_of_the_project_is_in_the_lock_file() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(name for extra in ("scheduler", "agent", "registry", "gateway", "local") for name in extras[extra])]
    locked = set(re.findall(r"^([a-z0-9._-]+)(?:\[.*\])?==", (_ROOT / "requirements" / "local.txt").read_text(), re.M))
    names = {re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-") for requirement in wanted}
    assert names - {"opentinker"} <= locked, "run `make lock`"


def test_progress_goes_on_while_pip_removes_what_is_counted(tmp_path: Path) -> None:
    downloads, over = tmp_path / "downloads", threading.Event()
    progress = preflight._Progress(tmp_path, downloads, 3.4)

    def come_and_go() -> None:
        number = 0
        while not over.is_set():
            number += 1
            folder = downloads / f"pip-unpack-{number}"
            folder.mkdir(parents=True)
            (folder / "a.whl").write_bytes(b"1234")
            shutil.rmtree(folder)

    pip = threading.Thread(target=come_and_go)
    pip.start()
    try:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            assert "GB fetched" in progress._text(time.time())
    finally:
        over.set()
        pip.join()
