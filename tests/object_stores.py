"""A real S3 server, and between it and whoever asks a proxy that counts requests and makes faults."""

import base64
import collections
import contextlib
import hashlib
import http.client
import http.server
import json
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from maxbatch.config.registry import library
from maxbatch.data import object_store

BUCKET = "bucket"


class Proxy(http.server.ThreadingHTTPServer):
  """Passes requests on to `target`, all but those of objects' contents as they are."""

  def __init__(self, target: str):
    super().__init__(("127.0.0.1", 0), _Handler)
    self.target = urlsplit(target).netloc
    self.requests: collections.Counter[str] = collections.Counter()
    self.faults: collections.deque[Callable[[_Handler, http.client.HTTPResponse, bytes], None]]
    self.faults = collections.deque()
    """Each for one request; then there are none."""
    self.faulty = "contents"
    """Of which requests: for an object's contents, or else by method."""

  @property
  def url(self) -> str:
    return f"http://127.0.0.1:{self.server_address[1]}"

  def contents_read(self) -> int:
    """How often an object's contents were asked for since this was last asked."""
    count, self.requests["contents"] = self.requests["contents"], 0
    return count


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  server: Any

  def _pass_on(self) -> None:
    length = int(self.headers.get("Content-Length", 0))
    body = self.rfile.read(length) if length else None
    target = http.client.HTTPConnection(self.server.target)
    with contextlib.closing(target):
      target.request(self.command, self.path, body, dict(self.headers))
      answer = target.getresponse()
      content = answer.read()
    parts = urlsplit(self.path)
    is_contents = self.command == "GET" and not parts.query and parts.path.count("/") > 1
    kind = "contents" if is_contents else self.command
    self.server.requests[kind] += 1
    faulty = kind == self.server.faulty and self.server.faults
    (self.server.faults.popleft() if faulty else whole)(self, answer, content)

  do_GET = do_HEAD = do_PUT = do_POST = _pass_on

  def send(self, status: int, headers: dict[str, str], content: bytes) -> None:
    self.send_response_only(status)
    for name, value in headers.items():
      self.send_header(name, value)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(content)

  def log_message(self, format: str, *args: Any) -> None: ...


def _headers(answer: http.client.HTTPResponse, length: int) -> dict[str, str]:
  left_out = ("content-length", "transfer-encoding", "connection", "server", "date")
  kept = {name: value for name, value in answer.getheaders() if name.lower() not in left_out}
  if answer.getheader("content-length") is not None:
    kept["Content-Length"] = str(length)
  return kept


def _without_checksums(answer: http.client.HTTPResponse, length: int) -> dict[str, str]:
  """As of stores that keep none."""
  headers = _headers(answer, length)
  return {name: value for name, value in headers.items() if "checksum" not in name.lower()}


def whole(handler: _Handler, answer: http.client.HTTPResponse, content: bytes) -> None:
  length = int(answer.getheader("content-length") or len(content))
  handler.send(answer.status, {"Content-Length": "0"} | _headers(answer, length), content)


def slow(handler: _Handler, answer: http.client.HTTPResponse, content: bytes) -> None:
  """Nothing until whoever asks has gone."""
  del answer, content
  handler.connection.recv(1)
  handler.close_connection = True


def too_busy(handler: _Handler, answer: http.client.HTTPResponse, content: bytes) -> None:
  del answer, content
  said = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
  handler.send(503, {"Content-Length": str(len(said))}, said)


def denied(handler: _Handler, answer: http.client.HTTPResponse, content: bytes) -> None:
  del answer, content
  said = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
  handler.send(403, {"Content-Length": str(len(said))}, said)


def reset(handler: _Handler, answer: http.client.HTTPResponse, content: bytes) -> None:
  """Half of it, and then an end of the connection that is none (RST)."""
  handler.send(answer.status, _headers(answer, len(content)), content[: len(content) // 2])
  handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
  handler.wfile.flush()
  handler.connection.close()
  handler.close_connection = True


def truncated(handler: _Handler, answer: http.client.HTTPResponse, content: bytes) -> None:
  """Half of what the headers promise, and a proper end."""
  handler.send(answer.status, _headers(answer, len(content)), content[: len(content) // 2])
  handler.close_connection = True


def shorter(handler: _Handler, answer: http.client.HTTPResponse, content: bytes) -> None:
  """Half of it, as if there were no more."""
  half = content[: len(content) // 2]
  handler.send(answer.status, _without_checksums(answer, len(half)), half)


def altered(handler: _Handler, answer: http.client.HTTPResponse, content: bytes) -> None:
  """All of it, with one letter of another case."""
  other = content.replace(b"e", b"E", 1)
  handler.send(answer.status, _without_checksums(answer, len(other)), other)


class GoogleServer(http.server.ThreadingHTTPServer):
  """A stand-in for Google Cloud Storage: lists objects and sends ranges of them."""

  def __init__(self, objects: dict[str, bytes]):
    super().__init__(("127.0.0.1", 0), _GoogleHandler)
    self.objects = objects
    self.contents_read = 0
    self.is_forbidden = False
    threading.Thread(target=self.serve_forever, daemon=True).start()

  @property
  def url(self) -> str:
    return f"http://127.0.0.1:{self.server_address[1]}"

  def __exit__(self, *args: Any) -> None:
    self.shutdown()
    super().__exit__(*args)


class _GoogleHandler(_Handler):
  def do_GET(self) -> None:
    parts = urlsplit(self.path)
    query, objects = parse_qs(parts.query), self.server.objects
    name = unquote(parts.path.partition("/o/")[2])
    if self.server.is_forbidden:
      self._say(403, {"error": {"code": 403, "message": "no"}})
    elif parts.path.endswith("/o"):
      prefix = query.get("prefix", [""])[0]
      # As if there were no folders, which Google's store does not have either.
      items = [self._info(name) for name in objects if name.startswith(prefix)]
      self._say(200, {"items": items})
    elif name not in objects:
      self._say(404 if name else 200, {"name": "bucket"})
    elif query.get("alt") == ["media"]:
      self.server.contents_read += 1
      first, last = self.headers["Range"].removeprefix("bytes=").split("-")
      part = objects[name][int(first) : int(last) + 1]
      self.send(206, {"Content-Length": str(len(part))}, part)
    else:
      self._say(200, self._info(name))

  def _info(self, name: str) -> dict[str, str]:
    content = self.server.objects[name]
    md5 = base64.b64encode(hashlib.md5(content).digest()).decode()
    about = {"name": name, "bucket": "bucket", "size": str(len(content)), "etag": md5}
    return about | {"md5Hash": md5, "generation": "1"}

  def _say(self, status: int, content: object) -> None:
    body = json.dumps(content).encode()
    self.send(status, {"Content-Length": str(len(body)), "Content-Type": "application/json"}, body)


@contextlib.contextmanager
def s3_behind_proxy() -> Iterator[tuple[Proxy, Any]]:
  """The proxy, which botocore and what uses it now take for S3, and a client of it."""
  logging.getLogger("werkzeug").setLevel(logging.ERROR)
  server = library("moto.server", "the tests").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
  server.start()
  host, port = server.get_host_and_port()
  proxy = Proxy(f"http://{host}:{port}")
  thread = threading.Thread(target=proxy.serve_forever, daemon=True)
  thread.start()
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("AWS_ENDPOINT_URL", proxy.url)
    patch.setenv("AWS_ACCESS_KEY_ID", "testing")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    patch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    patch.setattr(object_store, "FIRST_WAIT_SECONDS", 0.01)
    system = object_store.S3.open("the tests")
    system.call_s3("create_bucket", Bucket=BUCKET)
    yield proxy, system
  proxy.shutdown()
  proxy.server_close()
  server.stop()
  thread.join()
