"""A registry and an object store in one thread, for tests of agents and trainers: same HTTP API, faults on demand."""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlparse

from opentinker.schemas.registry_api import BeginCheckpoint, CommitCheckpoint, OpenAttempt

AGENT_TOKEN = "agent-token-of-the-tests"


class FakeRegistry:
    """Remembers what it was told. `fault(method, path)` may return a status to answer with instead."""

    def __init__(self) -> None:
        self.opened: list[OpenAttempt] = []
        self.fence: dict[str, tuple[int, int]] = {}
        self.tokens: dict[str, tuple[str, int, int]] = {}
        self.blobs: dict[str, bytes] = {}
        self.begun: dict[str, BeginCheckpoint] = {}
        self.committed: dict[str, tuple[BeginCheckpoint, CommitCheckpoint]] = {}
        self.commit_order: list[str] = []
        self.fault: Callable[[str, str], int | None] = lambda method, path: None
        self.requests: list[tuple[str, str, str]] = []  # method, path, authorization
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _do(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                path = urlparse(self.path).path
                outer.requests.append((self.command, path, self.headers.get("authorization", "")))
                status = outer.fault(self.command, path)
                answer: tuple[int, bytes, dict[str, str]] = (status, b"{}", {}) if status else outer._answer(self, path, body)
                self.send_response(answer[0])
                for name, value in answer[2].items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(answer[1])))
                self.end_headers()
                self.wfile.write(answer[1])

            do_GET = do_POST = do_PUT = _do

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def newest(self, job_uid: str) -> str | None:
        """The committed checkpoint with the highest step."""
        mine = [(begun.global_step, place, id_) for place, id_ in enumerate(self.commit_order) for begun in [self.committed[id_][0]]]
        return max(mine)[2] if mine else None

    def files_of(self, checkpoint_id: str) -> dict[str, bytes]:
        return {file.name: self.blobs[f"{checkpoint_id}/{file.name}"] for file in self.committed[checkpoint_id][0].files}

    def _answer(self, request: BaseHTTPRequestHandler, path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if path == "/v1/agents/check":
            return (204 if token == AGENT_TOKEN else 401), b"", {}
        if path.startswith("/blob/"):
            assert not token, "the attempt token must not go to the store"
            name = path.removeprefix("/blob/")
            if request.command == "PUT":
                self.blobs[name] = body
                return 200, b"", {"etag": f'"{hashlib.md5(body).hexdigest()}"'}
            return 200, self.blobs[name], {}
        if path == "/v1/attempts/open":
            return self._open(token, OpenAttempt.model_validate_json(body))
        if token not in self.tokens:
            return 401, b"{}", {}
        job_uid, attempt, epoch = self.tokens[token]
        if self.fence[job_uid] != (attempt, epoch):
            return self._json(409, {"reason": "fenced", "detail": "a later attempt has been opened"})
        if path == "/v1/checkpoints/begin":
            begin = BeginCheckpoint.model_validate_json(body)
            self.begun[begin.checkpoint_id] = begin
            if begin.checkpoint_id in self.committed:
                return self._json(200, {"uploads": [], "committed": True})
            uploads = [
                {"name": f.name, "upload_id": "u", "parts": [{"number": 1, "size": f.size, "url": f"{self.url}/blob/{begin.checkpoint_id}/{f.name}"}]}
                for f in begin.files
            ]
            return self._json(200, {"uploads": uploads, "committed": False})
        checkpoint_id = path.split("/")[3]
        commit = CommitCheckpoint.model_validate_json(body)
        begin = self.begun[checkpoint_id]
        if checkpoint_id in self.committed and [f.sha256 for f in self.committed[checkpoint_id][0].files] != [f.sha256 for f in commit.files]:
            return self._json(409, {"reason": "conflict", "detail": "another content"})
        for file in commit.files:
            assert hashlib.sha256(self.blobs[f"{checkpoint_id}/{file.name}"]).hexdigest() == file.sha256
        if checkpoint_id not in self.committed:
            self.commit_order.append(checkpoint_id)
        self.committed[checkpoint_id] = (begin, commit)
        model = {"name": "cartpole", "version": 1} if commit.final and commit.outcome == "Succeeded" else None
        return self._json(200, {"checkpoint_id": checkpoint_id, "model": model})

    def _open(self, token: str, asked: OpenAttempt) -> tuple[int, bytes, dict[str, str]]:
        if token != AGENT_TOKEN:
            return 401, b"{}", {}
        self.opened.append(asked)
        fence = (asked.attempt_number, asked.lease_epoch)
        if fence < self.fence.get(asked.job_uid, (0, 0)):
            return self._json(409, {"reason": "fenced", "detail": "behind"})
        self.fence[asked.job_uid] = fence
        attempt_token = uuid.uuid4().hex
        self.tokens[attempt_token] = (asked.job_uid, *fence)
        newest = self.newest(asked.job_uid)
        resume = None
        if newest is not None:
            begun = self.committed[newest][0]
            files = [{**file.model_dump(), "url": f"{self.url}/blob/{newest}/{file.name}"} for file in begun.files]
            resume = {"checkpoint_id": newest, "global_step": begun.global_step, "attempt_number": 1, "files": files}
        return self._json(200, {"attempt_token": attempt_token, "resume": resume})

    @staticmethod
    def _json(status: int, document: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        return status, json.dumps(document).encode(), {"content-type": "application/json"}
