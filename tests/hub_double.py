"""A double of the Hugging Face Hub: what real clients ask of it, over HTTP, kept in memory.

    with HubDouble({"hf_a_token": "ada"}) as hub:
        ...  # processes with HF_ENDPOINT=hub.url and HF_HUB_DISABLE_XET=1

Knows users by their tokens, private repositories, branches, commits, and large files as Git LFS;
Spaces as repositories named spaces/owner/name.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = re.compile(r"\.(safetensors|bin|pt|pth|png)$")
NAME = r"(?P<name>(?:spaces/)?[^/]+/[^/]+)"
REVISION = r"(?P<revision>[^/]+)"  # with its own slashes encoded
TIME = "2026-01-01T00:00:00.000Z"


@dataclass
class Repository:
    """Commits by their hash, each a whole tree of file contents, and branches by their name."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, tree: dict[str, bytes], message: str) -> str:
        """Puts a tree on a branch; returns its hash."""
        described = repr((len(self.commits), message, sorted(tree)))
        revision = hashlib.sha1(described.encode()).hexdigest()
        self.commits[revision] = tree
        self.branches[branch] = revision
        self.messages.append(message)
        return revision

    def resolve(self, revision: str) -> str:
        """The hash that a branch, or a hash, stands for.

        Raises:
            RefusedError: If there is none.
        """
        found = self.branches.get(revision, revision)
        if found not in self.commits:
            raise RefusedError(404, "RevisionNotFound")
        return found


class RefusedError(Exception):
    """A request that is answered by an error."""

    def __init__(self, status: int, code: str, message: str = "", **further: Any):
        super().__init__(message or code)
        self.status = status
        self.code = code
        self.body = {"error": str(self), **further}


class HubDouble:
    """The server, running inside a `with` block.

    Args:
        users: Names by token.

    Attributes:
        url: What clients take as `HF_ENDPOINT`.
        repositories: By `owner/name`.
        requests: Method, path and token of everything that was asked.
    """

    def __init__(self, users: dict[str, str]):
        self.users = users
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.large_files: dict[str, bytes] = {}
        self.lock = threading.RLock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self) -> "HubDouble":
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """What a repository holds."""
        repository = self.repositories[name]
        return repository.commits[repository.resolve(revision)]

    # Who may do what

    def repository(self, name: str, user: str | None) -> Repository:
        """A repository that a user may read."""
        found = self.repositories.get(name)
        if found is None or (found.private and user != name.split("/")[-2]):
            # The Hub does not tell what it hides from what it has not.
            status = 401 if user is None else 404
            raise RefusedError(status, "RepoNotFound", "Repository not found")
        return found

    def writable(self, name: str, user: str | None) -> Repository:
        """A repository that a user may change."""
        found = self.repository(name, user)
        if user != name.split("/")[-2]:
            raise RefusedError(403, "Forbidden", f"You have no write access to {name}")
        return found

    # What clients ask

    def whoami(self, user: str | None) -> dict[str, Any]:
        """GET /api/whoami-v2."""
        if user is None:
            raise RefusedError(401, "Unauthorized", "Invalid username or password.")
        token = {"displayName": "a token", "role": "write"}
        return {
            "type": "user",
            "name": user,
            "orgs": [],
            "auth": {"type": "access_token", "accessToken": token},
        }

    def create(self, user: str | None, wanted: dict[str, Any]) -> dict[str, Any]:
        """POST /api/repos/create."""
        self.whoami(user)
        owner = wanted.get("organization") or user
        name = f"{owner}/{wanted['name']}"
        if wanted.get("type") == "space":
            name = f"spaces/{name}"
        if owner != user:
            raise RefusedError(403, "Forbidden", f"You have no rights under {owner}")
        if name in self.repositories:
            message = "You already created this model repo"
            raise RefusedError(409, "Conflict", message, url=f"{self.url}/{name}")
        private = wanted.get("private") is True or wanted.get("visibility") == "private"
        repository = self.repositories[name] = Repository(private)
        repository.commit("main", {".gitattributes": b""}, "initial commit")
        return {"url": f"{self.url}/{name}", "name": name, "id": name}

    def branch(self, name: str, user: str | None, branch: str) -> dict[str, Any]:
        """POST /api/models/NAME/branch/BRANCH."""
        repository = self.writable(name, user)
        if branch in repository.branches:
            raise RefusedError(409, "Conflict", "Reference already exists")
        repository.branches[branch] = repository.branches["main"]
        return {}

    def commit(self, name: str, user: str | None, branch: str, body: bytes) -> dict[str, Any]:
        """POST /api/models/NAME/commit/BRANCH: a line of JSON for each change."""
        repository = self.writable(name, user)
        tree = dict(repository.commits[repository.resolve(branch)])
        message = ""
        for line in filter(None, body.splitlines()):
            change = json.loads(line)
            kind, value = change["key"], change["value"]
            if kind == "header":
                message = value["summary"]
            elif kind == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                tree[value["path"]] = self.large_files[value["oid"]]
            elif kind == "deletedFile":
                del tree[value["path"]]
            else:
                raise RefusedError(400, "BadRequest", f"unknown change {kind}")
        revision = repository.commit(branch, tree, message)
        url = f"{self.url}/{name}/commit/{revision}"
        return {"success": True, "commitOid": revision, "commitUrl": url, "hookOutput": ""}

    def preupload(self, files: list[dict[str, Any]]) -> dict[str, Any]:
        """POST /api/models/NAME/preupload/BRANCH: which files go by LFS."""
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if LARGE.search(file["path"]) else "regular",
                "shouldIgnore": False,
            }
            for file in files
        ]
        return {"files": modes}

    def large_batch(self, objects: list[dict[str, Any]]) -> dict[str, Any]:
        """POST /NAME.git/info/lfs/objects/batch: where to send what is not there yet."""
        answers = []
        for wanted in objects:
            answer = dict(wanted)
            if wanted["oid"] not in self.large_files:
                answer["actions"] = {"upload": {"href": f"{self.url}/lfs/{wanted['oid']}"}}
            answers.append(answer)
        return {"transfer": "basic", "objects": answers}

    def info(self, name: str, user: str | None, revision: str) -> dict[str, Any]:
        """GET /api/models/NAME and /api/models/NAME/revision/REVISION."""
        repository = self.repository(name, user)
        found = repository.resolve(revision)
        return {
            "_id": name,
            "id": name,
            "modelId": name,
            "author": name.partition("/")[0],
            "sha": found,
            "private": repository.private,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "lastModified": TIME,
            "createdAt": TIME,
            "siblings": [{"rfilename": path} for path in repository.commits[found]],
        }

    def entries(self, name: str, user: str | None, revision: str, folder: str) -> list[Any]:
        """GET /api/models/NAME/tree/REVISION/FOLDER."""
        repository = self.repository(name, user)
        tree = repository.commits[repository.resolve(revision)]
        found = [_entry(path, tree[path]) for path in tree if path.startswith(folder)]
        if folder and not found:
            raise RefusedError(404, "EntryNotFound")
        return found


def parts(pattern: str, asked: str) -> dict[str, Any] | None:
    """The named parts of a request, decoded; None if it is not of this kind."""
    found = re.fullmatch(pattern, asked)
    if found is None:
        return None
    return {name: part and unquote(part) for name, part in found.groupdict().items()}


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(content), "oid": _blob(content)}
    if LARGE.search(path):
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return entry


def _handler_of(hub: HubDouble) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Says nothing: `hub.requests` holds it."""

        def answer_any(self) -> None:
            body = self.read_body()
            address = urlsplit(self.path)
            scheme, _, token = self.headers.get("Authorization", "").partition(" ")
            with hub.lock:
                hub.requests.append((self.command, address.path, token or None))
                try:
                    if scheme and token not in hub.users:
                        raise RefusedError(401, "Unauthorized", "Invalid username or password.")
                    self.route(address.path, hub.users.get(token), body)
                except RefusedError as refusal:
                    headers = {"X-Error-Code": refusal.code, "X-Error-Message": str(refusal)}
                    self.send(refusal.status, refusal.body, headers)

        do_GET = do_HEAD = do_POST = do_PUT = answer_any  # noqa: N815

        def read_body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def route(self, path: str, user: str | None, body: bytes) -> None:
            asked = f"{self.command} {path}".replace("/api/spaces/", "/api/models/spaces/")
            if asked == "GET /api/whoami-v2":
                self.send(200, hub.whoami(user))
            elif asked == "POST /api/validate-yaml":
                self.send(200, {"errors": [], "warnings": []})
            elif asked == "POST /api/repos/create":
                self.send(200, hub.create(user, json.loads(body)))
            elif found := parts(rf"POST /api/models/{NAME}/branch/(?P<branch>.+)", asked):
                self.send(200, hub.branch(user=user, **found))
            elif found := parts(rf"POST /api/models/{NAME}/preupload/.+", asked):
                hub.writable(found["name"], user)
                self.send(200, hub.preupload(json.loads(body)["files"]))
            elif found := parts(rf"POST /api/models/{NAME}/commit/(?P<branch>.+)", asked):
                self.send(200, hub.commit(user=user, body=body, **found))
            elif found := parts(rf"POST /{NAME}\.git/info/lfs/objects/batch", asked):
                hub.writable(found["name"], user)
                self.send(200, hub.large_batch(json.loads(body)["objects"]))
            elif found := parts(r"PUT /lfs/(?P<digest>\w+)", asked):
                if hashlib.sha256(body).hexdigest() != found["digest"]:
                    raise RefusedError(422, "BadRequest", "the content has another hash")
                hub.large_files[found["digest"]] = body
                self.send(200, {})
            elif found := parts(rf"POST /api/models/{NAME}/paths-info/{REVISION}", asked):
                entries = hub.entries(user=user, folder="", **found)
                is_json = "json" in self.headers.get("Content-Type", "")
                wanted = json.loads(body) if is_json else parse_qs(body.decode())
                self.send(200, [entry for entry in entries if entry["path"] in wanted["paths"]])
            elif found := parts(rf"GET /api/models/{NAME}/refs", asked):
                branches = hub.repository(found["name"], user).branches.items()
                refs = [
                    {"name": name, "ref": f"refs/heads/{name}", "targetCommit": target}
                    for name, target in branches
                ]
                self.send(200, {"branches": refs, "converts": [], "tags": []})
            elif found := parts(rf"GET /api/models/{NAME}/tree/{REVISION}/?(?P<folder>.*)", asked):
                self.send(200, hub.entries(user=user, **found))
            elif found := parts(rf"GET /api/models/{NAME}(?:/revision/{REVISION})?", asked):
                self.send(200, hub.info(found["name"], user, found["revision"] or "main"))
            elif found := parts(rf"(?:GET|HEAD) /{NAME}/resolve/{REVISION}/(?P<path>.+)", asked):
                repository = hub.repository(found["name"], user)
                self.send_file(repository, found["revision"], found["path"])
            else:
                raise RefusedError(404, "NoRoute", f"no route {asked}")

        def send_file(self, repository: Repository, revision: str, path: str) -> None:
            found = repository.resolve(revision)
            if path not in repository.commits[found]:
                headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": found}
                self.send(404, {"error": "Entry not found"}, headers)
                return
            content = repository.commits[found][path]
            entry = _entry(path, content)
            headers = {"X-Repo-Commit": found, "ETag": f'"{entry["oid"]}"'}
            if "lfs" in entry:
                headers["X-Linked-Etag"] = f'"{entry["lfs"]["oid"]}"'
                headers["X-Linked-Size"] = str(len(content))
            if part := re.match(r"bytes=(\d+)-", self.headers.get("Range", "")):
                start = int(part[1])
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                self.send(206, content[start:], headers)
            else:
                self.send(200, content, headers)

        def send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
            is_file = isinstance(content, bytes)
            data = content if is_file else json.dumps(content).encode()
            self.send_response(status)
            self.send_header(
                "Content-Type", "application/octet-stream" if is_file else "application/json"
            )
            self.send_header("Content-Length", str(len(data)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

    return Handler
