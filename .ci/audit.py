"""pip-audit on the pinned dependencies, with an honest last line: how many were looked up, how many could not be, which have known weaknesses.

    python .ci/audit.py [--if-reachable] [pip-audit's own options, for example --ignore-vuln ID]

Exit codes: 0 no known weakness, 1 at least one, 3 nothing could be looked up (0 with --if-reachable: a network that refuses stops no change).
pip-audit alone exits 0 when the service knows none of the packages.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def report(packages: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """pip-audit's `dependencies` as an exit code and lines."""
    audited = [package for package in packages if "skip_reason" not in package]
    if not audited:
        return 3, ["audit: nothing could be looked up" + (f": the service knows none of {len(packages)} packages" if packages else "")]
    found = [(package, weakness) for package in audited for weakness in package["vulns"]]
    lines = [
        f"{each['name']} {each['version']}: {weakness['id']}, mended in {', '.join(weakness['fix_versions']) or 'no version yet'}"
        for each, weakness in found
    ]
    lines.append(f"audit: {len(audited)} of {len(packages)} pinned packages looked up, {len(found)} known weaknesses")
    if found:
        lines.append("take newer versions with `make lock UPGRADE=1`, or name what does not concern us: make audit AUDIT='--ignore-vuln ID'")
    return 1 if found else 0, lines


def main(arguments: list[str]) -> int:
    options = [argument for argument in arguments if argument != "--if-reachable"]
    lock = str(ROOT / "requirements" / "local.txt")
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--require-hashes",
        "--disable-pip",
        "--progress-spinner=off",
        "--format=json",
        f"--requirement={lock}",
    ]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        packages = []
        sys.stderr.write(done.stderr[-500:])
    code, lines = report(packages)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if code == 3 and "--if-reachable" in arguments else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
