"""Becomes a program of the stack: `python -I -S launch.py SPEC.json [DIGEST]`.

Between supervisord and the program this sets what a supervisor cannot: the exact environment, a signal that comes when the parent dies (so that a
`kill -9` of supervisord leaves no orphans), a record of pid and start time (so that what is left all the same is found), and for PostgreSQL, which
refuses to run as root, another user id. Then it replaces itself, so pid and signals are the program's own. Standard library only.
"""

import contextlib
import ctypes
import json
import os
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1
_CLONE_NEWUSER = 0x10000000


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        spec: dict[str, Any] = json.load(file)
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if spec.get("record"):  # pid and start time stay what they are from here on
        _record(spec["record"], spec["name"])
    _become_user(spec.get("user"), libc)
    if spec.get("death_signal"):  # after the change of user, which clears it
        libc.prctl(_PR_SET_PDEATHSIG, int(spec["death_signal"]), 0, 0, 0)
        if os.getppid() != parent:  # died in between: the signal will never come
            sys.exit(1)
    os.umask(0o077)
    os.chdir(spec["cwd"])
    try:
        os.execve(spec["argv"][0], spec["argv"], spec["env"])  # noqa: S606 (no shell is the point)
    except OSError as error:
        sys.exit(f"cannot execute {spec['argv'][0]}: {error.strerror}")


def _record(path: str, name: str) -> None:
    with open("/proc/self/stat", encoding="utf-8") as file:
        started = int(file.read().rpartition(")")[2].split()[19])  # field 22: ticks since boot
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        boot = file.read().strip()
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump({"name": name, "pid": os.getpid(), "started": started, "boot_id": boot, "group": os.getpgid(0)}, file)
    os.replace(path + ".new", path)


def _become_user(user: "dict[str, Any] | None", libc: ctypes.CDLL) -> None:
    """`namespace`: a user namespace in which root's files belong to another id (nothing changes owner). `switch`: really become that id."""
    if not user:
        return
    if user["how"] == "switch":
        os.setgroups([])
        os.setgid(user["gid"])
        os.setuid(user["uid"])
        return
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER) != 0:
        sys.exit(f"cannot make a user namespace: {os.strerror(ctypes.get_errno())}")
    with contextlib.suppress(OSError), open("/proc/self/setgroups", "w", encoding="utf-8") as file:
        file.write("deny")
    with open("/proc/self/uid_map", "w", encoding="utf-8") as file:
        file.write(f"{user['uid']} {uid} 1")
    with open("/proc/self/gid_map", "w", encoding="utf-8") as file:
        file.write(f"{user['gid']} {gid} 1")


if __name__ == "__main__":
    main()
