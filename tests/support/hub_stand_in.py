"""A Hugging Face hub on the loopback interface: the few addresses that fetching a model needs, over files in memory."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/models/(?P<repository>[^/]+/[^/]+)(?:/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
_FILE = re.compile(r"/(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)")


class Hub(ThreadingHTTPServer):
    """``files``: repository -> name -> content. ``sizes``: what is claimed of a file instead of its true size.
    ``gated``: repositories that need ``token``. ``requests``: method and path of all requests so far."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.sizes: dict[str, int] = {}
        self.gated: set[str] = set()
        self.token = "hf_right"
        self.requests: list[tuple[str, str]] = []
        self.revisions = {"main", "v2", REVISION}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self) -> set[str]:
        """Names of files whose content was asked for."""
        return {match["name"] for method, path in self.requests if method == "GET" and (match := _FILE.fullmatch(path))}


@contextmanager
def running_hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *arguments: Any) -> None: ...

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path))
        match = _API.fullmatch(path) or _FILE.fullmatch(path)
        if match is None or match["repository"] not in self.server.files:
            return self._refuse(404, "RepoNotFound")
        if match["repository"] in self.server.gated and self.headers["Authorization"] != f"Bearer {self.server.token}":
            return self._refuse(403, "GatedRepo")
        if match["revision"] is not None and match["revision"] not in self.server.revisions:
            return self._refuse(404, "RevisionNotFound")
        files = self.server.files[match["repository"]]
        if match.re is _API:
            return self._describe(match["repository"], match["what"], files)
        if match["name"] not in files:
            return self._refuse(404, "EntryNotFound")
        content = files[match["name"]]
        etag = hashlib.sha256(content).hexdigest()
        self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": REVISION})

    def _describe(self, repository: str, what: str | None, files: dict[str, bytes]) -> None:
        sizes = {name: self.server.sizes.get(name, len(content)) for name, content in files.items()}
        if what == "tree":
            entries = [
                {"type": "file", "path": name, "size": size, "oid": hashlib.sha1(files[name]).hexdigest()}
                for name, size in sizes.items()
            ]
            return self._send(200, json.dumps(entries).encode())
        siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        info = {"id": repository, "sha": REVISION, "siblings": siblings}
        self._send(200, json.dumps(info).encode())

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b'{"error": "no"}', {"X-Error-Code": code, "X-Error-Message": "no"})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
