"""A Hugging Face hub on this machine (for HF_ENDPOINT), with folders as repositories to read and push to."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"  # of the one commit that a repository has
_RESOLVE = re.compile(r"/(?:(datasets)/)?([\w-]+/[\w.-]+)/resolve/[^/]+/(.+)")
_API = re.compile(r"/api/(models|datasets)/([\w-]+/[\w.-]+)(?:/(.*))?")


class Hub:
    """The hub's server.

    Args:
        root: the folder that contains ``models/OWNER/NAME`` and ``datasets/OWNER/NAME``.

    Attributes:
        asked: the requests so far, in the form ``GET /path``.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.asked = root, list[str]()
        hub = self

        class Handler(_Handler):
            owner = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[Hub]:
        """Serve requests inside the block."""
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def folder(self, kind: str, name: str) -> Path:
        """Return the folder of a repository."""
        return self.root / kind / name


class _Handler(BaseHTTPRequestHandler):
    owner: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Do not log anything."""

    def do_HEAD(self) -> None:
        self._get(body=False)

    def do_GET(self) -> None:
        self._get(body=True)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self._path()
        if path == "/api/repos/create":
            wanted = json.loads(content)
            name = "/".join(filter(None, (wanted.get("organization") or "me", wanted["name"])))
            self.owner.folder("models", name).mkdir(parents=True, exist_ok=True)
            return self._json({"url": f"{self.owner.url}/{name}", "id": name})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        match = _API.fullmatch(path)
        if match is None:
            return self._absent()
        kind, name, rest = match.groups()
        folder = self.owner.folder(kind, name)
        if rest.startswith("preupload/"):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(content)["files"]
            ]
            return self._json({"files": files})
        if rest.startswith("commit/"):
            for line in map(json.loads, content.splitlines()):
                if line["key"] == "file":
                    target = folder / line["value"]["path"]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(base64.b64decode(line["value"]["content"]))
            url = f"{self.owner.url}/{name}/commit/{SHA}"
            return self._json({"commitUrl": url, "commitOid": SHA, "success": True})
        if rest.startswith("paths-info/"):
            paths = json.loads(content)["paths"] if content[:1] == b"{" else []
            return self._json([_entry(folder, folder / path) for path in paths if (folder / path).exists()])
        return self._absent()

    def _path(self) -> str:
        self.owner.asked.append(f"{self.command} {urlsplit(self.path).path}")
        return unquote(urlsplit(self.path).path)

    def _get(self, *, body: bool) -> None:
        path = self._path()
        if path == "/api/whoami-v2":
            return self._json({"type": "user", "name": "me", "orgs": [], "auth": {"type": "access_token"}})
        if match := _RESOLVE.fullmatch(path):
            kind, name, file = match.groups()
            return self._file(self.owner.folder(kind or "models", name) / file, body=body)
        if match := _API.fullmatch(path):
            return self._about(*match.groups())
        return self._absent()

    def _file(self, path: Path, *, body: bool) -> None:
        if not path.is_file():
            return self._absent("EntryNotFound")
        content = path.read_bytes()
        first, last = 0, len(content)
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(part[1]), int(part[2]) + 1 if part[2] else len(content)
        self.send_response(206 if part else 200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content[first:last])))
        if part:
            self.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(content)}")
        self.end_headers()
        if body:
            self.wfile.write(content[first:last])

    def _about(self, kind: str, name: str, rest: str | None) -> None:
        folder = self.owner.folder(kind, name)
        if not folder.is_dir():
            return self._absent("RepoNotFound")
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        if rest is None or re.fullmatch(r"revision/[^/]+", rest):
            names = [{"rfilename": str(path.relative_to(folder))} for path in files]
            about = {"id": name, "sha": SHA, "siblings": names, "private": False, "tags": [], "downloads": 0}
            return self._json({**about, "_id": "1", "likes": 0, "gated": False, "disabled": False})
        if match := re.fullmatch(r"tree/[^/]+/?(.*)", rest):
            below = folder / match[1]
            if not below.is_dir():
                return self._absent("EntryNotFound")
            paths = sorted(below.rglob("*") if "recursive=" in self.path else below.iterdir())
            return self._json([_entry(folder, path) for path in paths])
        return self._absent("EntryNotFound")

    def _absent(self, code: str = "") -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    """Return the hub's description of a file or folder in a listing."""
    name = str(path.relative_to(folder))
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": SHA, "size": 0}
    return {
        "type": "file",
        "path": name,
        "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
        "size": path.stat().st_size,
    }
