"""A small fake of Google Cloud Storage for tests: the JSON API over HTTP, with objects in memory.

Objects are written atomically and cannot be appended to or renamed. Every write gives the object a new
generation, and a request may require a given generation (`ifGenerationMatch`). gcsfs,
google-cloud-storage and TensorStore use this server as they use Google's.
"""

import base64
import contextlib
import dataclasses
import datetime
import email
import email.policy
import hashlib
import http.server
import json
import re
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

BUCKET = "bucket"


@dataclasses.dataclass(frozen=True)
class Blob:
    data: bytes
    generation: int
    updated: str


class Rejected(Exception):
    """An error response: its status and reason."""


class Store:
    """The objects of a bucket by name.

    Attributes:
      blobs: the objects.
      history: the name and bytes of each write, in order; a removal has None in place of bytes.
      reject: called with the method and object name of each request; returns the status with which
        to reject the request, or 0.
    """

    def __init__(self) -> None:
        self.blobs: dict[str, Blob] = {}
        self.history: list[tuple[str, bytes | None]] = []
        self.reject: Callable[[str, str], int] = lambda method, name: 0
        self.uploads: dict[str, tuple[str, dict[str, str], bytearray]] = {}
        self._lock = threading.Lock()
        self._generation = time.time_ns() // 1000

    def write(self, name: str, data: bytes, query: dict[str, str] | None = None) -> dict[str, Any]:
        """Writes an object if its generation matches the query."""
        with self._lock:
            self._check(name, query or {})
            self._generation += 1
            now = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
            self.blobs[name] = Blob(data, self._generation, now)
            self.history.append((name, data))
            return self.describe(name)

    def delete(self, name: str, query: dict[str, str]) -> None:
        with self._lock:
            if name not in self.blobs:
                raise Rejected(404, f"No such object: {BUCKET}/{name}")
            self._check(name, query)
            del self.blobs[name]
            self.history.append((name, None))

    def _check(self, name: str, query: dict[str, str]) -> None:
        wanted, there = query.get("ifGenerationMatch"), self.blobs.get(name)
        if wanted is not None and int(wanted) != (there.generation if there else 0):
            raise Rejected(412, "At least one of the pre-conditions you specified did not hold.")

    def describe(self, name: str) -> dict[str, Any]:
        blob = self.blobs.get(name)
        if blob is None:
            raise Rejected(404, f"No such object: {BUCKET}/{name}")
        md5 = hashlib.md5(blob.data).digest()
        return {
            "kind": "storage#object",
            "name": name,
            "bucket": BUCKET,
            "generation": str(blob.generation),
            "metageneration": "1",
            "size": str(len(blob.data)),
            "updated": blob.updated,
            "timeCreated": blob.updated,
            "md5Hash": base64.b64encode(md5).decode(),
            "contentType": "application/octet-stream",
            "etag": str(blob.generation),
            "storageClass": "STANDARD",
        }

    def listing(self, query: dict[str, str]) -> dict[str, Any]:
        """Returns a page of the objects and pseudo-folders below a prefix."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        with self._lock:
            entries: dict[str, dict[str, Any] | None] = {}
            for name in sorted(self.blobs):
                if not name.startswith(prefix):
                    continue
                rest = name[len(prefix) :]
                if delimiter and delimiter in rest:
                    entries[prefix + rest.split(delimiter)[0] + delimiter] = None
                else:
                    entries[name] = self.describe(name)
        begin = query.get("pageToken", query.get("startOffset", ""))
        end = query.get("endOffset", "")
        names = [name for name in sorted(entries) if name >= begin and (not end or name < end)]
        size = int(query.get("maxResults", 1000))
        page = names[:size]
        actual: dict[str, Any] = {
            "kind": "storage#objects",
            "items": [entries[name] for name in page if entries[name] is not None],
            "prefixes": [name for name in page if entries[name] is None],
        }
        if len(names) > size:
            actual["nextPageToken"] = names[size]
        return actual

    def date(self, name: str, when: datetime.datetime) -> None:
        updated = when.strftime("%Y-%m-%dT%H:%M:%S.000Z")
        self.blobs[name] = dataclasses.replace(self.blobs[name], updated=updated)

    def clear(self) -> None:
        self.blobs, self.history = {}, []
        self.reject = lambda method, name: 0

    def replay(self, history: Sequence[tuple[str, bytes | None]]) -> None:
        """Clears the store and repeats the writes of `history`, such as those before a process was killed."""
        self.clear()
        for name, data in history:
            if data is None:
                self.delete(name, {})
            else:
                self.write(name, data)

    def names(self, prefix: str = "") -> list[str]:
        """Returns the names of the objects below a prefix, without the prefix."""
        return sorted(n.removeprefix(prefix) for n in list(self.blobs) if n.startswith(prefix))

    def text(self, name: str) -> str:
        return self.blobs[name].data.decode()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Server"

    def log_message(self, *arguments: Any) -> None:
        pass

    def _answer(self) -> None:
        body = self._body()
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        try:
            status, headers, data = self._route(url.path, query, body)
        except Rejected as rejected:
            status, reason = rejected.args
            headers, text = {}, {"error": {"code": status, "message": reason}}
            data = json.dumps(text).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        # The client may be killed while it waits.
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = _answer

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().strip() or b"0", 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _route(
        self, path: str, query: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        store = self.server.store
        actual = re.fullmatch(
            r"(/upload|/download)?/storage/v1/b(?:/([^/]+)(?:/o(?:/(.*))?)?)?", path
        )
        if actual is None or actual[2] is None:  # for example the creation of a bucket
            raise Rejected(403, f"{self.command} {path} is not allowed")
        kind, bucket = actual[1], actual[2]
        name = urllib.parse.unquote(actual[3] or "")
        named = name or query.get("name", "")
        if status := store.reject(self.command, named):
            raise Rejected(status, f"{named} is rejected")
        if bucket != BUCKET:
            raise Rejected(404, "The specified bucket does not exist.")
        if kind == "/upload":
            return self._upload(query, body)
        if not path.rstrip("/").endswith("/o") and not name:
            return self._json({"kind": "storage#bucket", "name": bucket, "location": "US"})
        if not name:
            return self._json(store.listing(query))
        if "/" in path and re.search(r"/(moveTo|rewriteTo|copyTo|compose)(/|$)", path):
            raise Rejected(501, "This server does not implement copy, move or compose.")
        if self.command == "DELETE":
            store.delete(name, query)
            return 204, {}, b""
        if query.get("alt") == "media" or kind == "/download":
            return self._media(name)
        return self._json(store.describe(name))

    def _json(self, value: Any) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()

    def _media(self, name: str) -> tuple[int, dict[str, str], bytes]:
        described = self.server.store.describe(name)
        data = self.server.store.blobs[name].data
        headers = {
            "X-Goog-Generation": described["generation"],
            "Content-Type": "application/octet-stream",
        }
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return 200, headers, data
        if not wanted[1]:
            begin, end = max(0, len(data) - int(wanted[2])), len(data)
        else:
            begin = int(wanted[1])
            end = min(int(wanted[2]) + 1, len(data)) if wanted[2] else len(data)
        if begin >= len(data):
            raise Rejected(416, "The requested range is not satisfiable.")
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        return 206, headers, data[begin:end]

    def _upload(self, query: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        store = self.server.store
        if "upload_id" in query:
            return self._part(query["upload_id"], body)
        kind, name = query.get("uploadType"), query.get("name")
        if kind == "media":
            return self._json(store.write(str(name), body, query))
        if kind == "multipart":
            head = f"Content-Type: {self.headers['Content-Type']}\n\n".encode()
            message = email.message_from_bytes(head + body, policy=email.policy.HTTP)
            metadata, data = message.get_payload()
            name = name or json.loads(metadata.get_payload(decode=True))["name"]
            # The parser would change line endings within the data.
            separator = b"--" + str(message.get_boundary()).encode()
            part = body.split(separator)[2]
            data = re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1]
            data = re.sub(rb"\r?\n$", b"", data) if not data.endswith(b"\r\n") else data[:-2]
            if status := store.reject(self.command, name):
                raise Rejected(status, f"{name} is rejected")
            return self._json(store.write(name, data, query))
        name = name or json.loads(body)["name"]
        upload = f"{len(store.uploads)}"
        store.uploads[upload] = (str(name), query, bytearray())
        location = (
            f"http://{self.headers['Host']}/upload/storage/v1/b/{BUCKET}/o?upload_id={upload}"
        )
        return 200, {"Location": location}, b""

    def _part(self, upload: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        store = self.server.store
        name, query, data = store.uploads[upload]
        if self.command == "DELETE":
            return 499, {}, b""
        data += body
        total = self.headers.get("Content-Range", "").rpartition("/")[2]
        if total == "*":
            return 308, {"Range": f"bytes=0-{len(data) - 1}"}, b""
        return self._json(store.write(name, bytes(data), query))


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    store: Store

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints only errors of the server, not those of killed clients."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serve() -> Iterator[tuple[Store, dict[str, str]]]:
    """Yields an empty store with one bucket, and the environment variables that select it."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.store = Store()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield (
            server.store,
            {
                "STORAGE_EMULATOR_HOST": url,  # for google-cloud-storage and gcsfs
                "TENSORSTORE_GCS_HTTP_URL": url,
                # Do not ask for credentials.
                "FSSPEC_GCS_TOKEN": "anon",
                "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            },
        )
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
