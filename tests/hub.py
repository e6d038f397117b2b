"""A model hub on this machine: a small server in the tests' own process."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

REPO = "meta-llama/Llama-3.1-8B"
COMMIT = "5" * 40
PIECE = 16 * 2**20


class Mirror:
    """A hub with scripted answers: path -> (status, headers, body). Remembers what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        self.silent = threading.Event()
        self.pause_s = 0.0  # after each piece of a large file
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.asked.append((self.command, self.path, self.headers["authorization"]))
                if mirror.silent.is_set():
                    mirror.over.wait(30)
                    return
                path = self.path.partition("?")[0]
                status, headers, body = mirror.answers.get(path, (404, {"x-error-code": "EntryNotFound"}, b""))
                self.send_response(status)
                for name, value in ({"content-length": str(len(body))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    for at in range(0, len(body), PIECE):
                        self.wfile.write(body[at : at + PIECE])
                        time.sleep(mirror.pause_s if len(body) > PIECE else 0)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self.over = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def has(self, file: str, body: bytes = b"", status: int = 200, revision: str = "main", **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answers[f"/{REPO}/resolve/{revision}/{file}"] = (status, named, body)

    def has_model(self, folder: Path) -> None:
        """Every file of ``folder``, and what Hugging Face's own library asks about a repository."""
        entries = []
        for path in sorted(file for file in folder.iterdir() if file.is_file()):
            body = path.read_bytes()
            digest = hashlib.sha1(body).hexdigest()
            for revision in ("main", COMMIT):
                self.has(path.name, body, revision=revision, etag=f'"{digest}"', x_repo_commit=COMMIT)
            entries.append({"type": "file", "path": path.name, "size": len(body), "oid": digest})
        info = {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": entry["path"]} for entry in entries]}
        for path, told in [("", info)] + [
            (f"/{what}/{revision}", told)
            for revision in ("main", COMMIT)
            for what, told in (("revision", info), ("tree", entries))
        ]:
            headers = {"content-type": "application/json"}
            self.answers[f"/api/models/{REPO}{path}"] = (200, headers, json.dumps(told).encode())

    def close(self) -> None:
        self.over.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@contextmanager
def running_mirror() -> Iterator[Mirror]:
    mirror = Mirror()
    try:
        yield mirror
    finally:
        mirror.close()


def forget_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process's own environment knows of hubs does not count."""
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
