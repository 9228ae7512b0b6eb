"""What `make audit` says of pip-audit's answer, which is also an answer when nothing was looked up."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

_PATH = Path(__file__).resolve().parents[2] / ".ci" / "audit.py"
_SKIPPED = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.9.0)"}
_SOUND = {"name": "click", "version": "8.1.0", "vulns": []}
_WEAK = {"name": "jinja2", "version": "3.1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3.1.6"]}, {"id": "PYSEC-2", "fix_versions": []}]}


@pytest.mark.parametrize(
    ("packages", "code", "lines"),
    [
        ([], 3, ["nothing could be looked up"]),
        ([_SKIPPED], 3, ["the service knows none of 1 packages"]),
        ([_SKIPPED, _SOUND], 0, ["1 of 2 pinned packages looked up, 0 known weaknesses"]),
        (
            [_SOUND, _WEAK],
            1,
            ["jinja2 3.1.0: PYSEC-1, mended in 3.1.6", "PYSEC-2, mended in no version yet", "2 known weaknesses", "make lock UPGRADE=1"],
        ),
    ],
)
def test_an_audit_that_looked_nothing_up_is_no_sound_one(packages: list[dict[str, Any]], code: int, lines: list[str]) -> None:
    spec = importlib.util.spec_from_file_location("audit", _PATH)
    assert spec is not None
    assert spec.loader is not None
    audit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    found, said = audit.report(packages)
    assert found == code
    assert len(said) == len(lines)
    assert all(line in text for line, text in zip(lines, said, strict=True))
