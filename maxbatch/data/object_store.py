"""Objects of a store by URL: listed, and read in ranges, with patience for a store that fails.

A store is known by the scheme of its URLs: its fsspec file system, and what its answers mean.

A request that fails is sent again with longer and longer waits in between, and a limit. What would
fail again (no credentials, no such bucket or object, no access) is named at once.
"""

import base64
import dataclasses
import errno
import glob
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Self, TypeVar

from maxbatch.config.find import did_you_mean
from maxbatch.config.registry import library
from maxbatch.errors import UserError

CONNECT_SECONDS = 10
READ_SECONDS = 30
"""Without a byte of an answer; then the request is given up."""


@dataclasses.dataclass(frozen=True)
class ObjectStore:
  """A kind of object store."""

  name: str
  open: Callable[[str], Any]
  """Its fsspec file system, which sends every request once; of what needs it, for errors.

  Raises UserError where its package is not installed."""
  errors: Callable[[], tuple[type[Exception], ...]]
  is_final: Callable[[Exception], bool]
  """Whether the same request would fail again."""
  endpoint: Callable[[Any], str]
  version: Callable[[Mapping[str, Any]], str]
  """Version from an object's listing: changes with its contents."""
  md5: Callable[[Mapping[str, Any]], str]
  """Likewise: the MD5 of its contents, if it says so."""
  has_md5: Callable[[Any, str], bool]
  """From (file system, object) to whether `md5` is one; some stores put something else there."""
  credentials: str
  """Where they are read, for a person who has none."""


def _gcs_open(what: str) -> Any:
  core = library("gcsfs.core", what, extra="gcs")
  # It prints tracebacks of errors that it also raises.
  logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
  limits = {"sock_connect": CONNECT_SECONDS, "sock_read": READ_SECONDS}
  timeout = library("aiohttp", what).ClientTimeout(total=None, **limits)
  session = {"timeout": timeout}
  return core.GCSFileSystem(access="read_only", use_listings_cache=False, session_kwargs=session)


def _gcs_errors() -> tuple[type[Exception], ...]:
  auth, http = library("google.auth.exceptions", "gs://"), library("gcsfs.retry", "gs://")
  client_error = library("aiohttp", "gs://").ClientError
  # gcsfs says by ValueError that a request is not understood.
  return (OSError, ValueError, http.HttpError, auth.GoogleAuthError, client_error)


def _gcs_is_final(error: Exception) -> bool:
  if isinstance(error, FileNotFoundError | PermissionError | ValueError):
    return True
  auth, http = library("google.auth.exceptions", "gs://"), library("gcsfs.retry", "gs://")
  if isinstance(error, auth.GoogleAuthError):
    return not isinstance(error, auth.TransportError)
  if isinstance(error, http.HttpError):
    return not http.is_retriable(error)
  return str(error).startswith("Forbidden")


GCS = ObjectStore(
  name="gs",
  open=_gcs_open,
  errors=_gcs_errors,
  is_final=_gcs_is_final,
  endpoint=lambda system: system.base,
  version=lambda info: str(info.get("etag", "")),
  # Objects that were composed of others have none.
  md5=lambda info: base64.b64decode(info.get("md5Hash", "")).hex(),
  has_md5=lambda system, path: True,
  credentials="GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login` (a "
  "public bucket needs none with FSSPEC_GS_TOKEN=anon)",
)


_FINAL_ERRNO = frozenset(
  {
    errno.EINVAL,  # Of s3fs, for a request that is not understood, among others.
    errno.EPERM,
    errno.ENOSYS,
    errno.EREMCHG,  # The bucket is in another region.
    errno.ENAMETOOLONG,
  }
)


def _s3_open(what: str) -> Any:
  once = {"total_max_attempts": 1, "mode": "standard"}
  options = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS, "retries": once}
  system = library("s3fs", what, extra="s3").S3FileSystem
  made = system(use_listings_cache=False, config_kwargs=options)
  made.retries = 1
  return made


def _s3_errors() -> tuple[type[Exception], ...]:
  botocore, parsers = library("botocore.exceptions", "s3://"), library("botocore.parsers", "s3://")
  client_error = library("aiohttp", "s3://").ClientError
  # botocore says by ValueError that an endpoint is no address.
  return (OSError, ValueError, botocore.BotoCoreError, parsers.ResponseParserError, client_error)


def _s3_endpoint(system: Any) -> str:
  try:
    return system.s3.meta.endpoint_url
  except (ValueError, library("botocore.exceptions", "s3://").BotoCoreError):  # It has no client.
    return os.environ.get("AWS_ENDPOINT_URL", "S3")


def _s3_is_final(error: Exception) -> bool:
  if isinstance(error, FileNotFoundError | PermissionError | ValueError):
    return True
  exceptions = library("botocore.exceptions", "s3://")
  passing = ("HTTPClientError", "ConnectionError", "IncompleteReadError", "FlexibleChecksumError")
  if isinstance(error, exceptions.BotoCoreError):
    return not isinstance(error, tuple(getattr(exceptions, name) for name in passing))
  return isinstance(error, OSError) and error.errno in _FINAL_ERRNO


def _s3_md5(info: Mapping[str, Any]) -> str:
  """Returns an object's MD5; an ETag with a hyphen is none: it was written in parts."""
  tag = str(info.get("ETag", "")).strip('"').lower()
  return tag if re.fullmatch("[0-9a-f]{32}", tag) else ""


def _s3_has_md5(system: Any, path: str) -> bool:
  """Returns whether the ETag is an MD5: with own keys or KMS it is of what is stored, not read."""
  bucket, _, key = path.partition("/")
  head = system.call_s3("head_object", Bucket=bucket, Key=key)
  return head.get("ServerSideEncryption", "AES256") == "AES256" and (
    "SSECustomerAlgorithm" not in head
  )


S3 = ObjectStore(
  name="s3",
  open=_s3_open,
  errors=_s3_errors,
  is_final=_s3_is_final,
  endpoint=_s3_endpoint,
  version=lambda info: str(info.get("ETag") or info.get("LastModified", "")).strip('"'),
  md5=_s3_md5,
  has_md5=_s3_has_md5,
  credentials="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (a public bucket needs "
  "none with FSSPEC_S3_ANON=true), and the store in AWS_ENDPOINT_URL if it is not Amazon's",
)


STORES: dict[str, ObjectStore] = {store.name: store for store in (S3, GCS)}


TRIES = 7
FIRST_WAIT_SECONDS = 0.5
"""After the first failure; twice as long after each further one, half a minute in all."""

_SEPARATOR = "://"
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def is_url(path: str) -> bool:
  """Returns whether a path of the configuration lies on another machine."""
  return _SEPARATOR in path


@dataclasses.dataclass(frozen=True)
class StoredObject:
  """What a store lists of an object."""

  path: str
  """Bucket and key."""
  size_bytes: int
  version: str
  md5: str
  """MD5 of its contents, in hexadecimal digits; empty where the store does not say."""


class Range(NamedTuple):
  """Some bytes of an object."""

  url: str
  start: int
  stop: int


class ShortAnswerError(OSError):
  """An answer with fewer bytes, or more, than were asked for."""


class _FailedError(Exception):
  """What went wrong with one of several requests."""

  def __init__(self, url: str, error: Exception):
    super().__init__(str(error))
    self.url, self.error = url, error


@dataclasses.dataclass(frozen=True)
class OpenStore:
  """The store of a URL, ready to be asked."""

  key: str
  store: ObjectStore
  system: Any

  @classmethod
  def of(cls, key: str, url: str) -> Self:
    """Opens the store that `url`, the value of `key`, names. Raises UserError: there is none of
    that kind, no bucket is named, or a package is missing."""
    scheme = url.partition(_SEPARATOR)[0]
    if scheme not in STORES:
      known = ", ".join(f"{name}://" for name in STORES)
      raise UserError(
        f"{key}={url}: {scheme}:// is not read here.{did_you_mean(scheme, STORES)} Known: {known}, "
        "and files and folders of this machine, mounted ones too"
      )
    bucket = _path(url).partition("/")[0]
    if not bucket or glob.has_magic(bucket):
      raise UserError(f"{key}={url}: give a bucket, for example {scheme}://bucket/data")
    return cls(key, STORES[scheme], STORES[scheme].open(f"{key}={url}"))

  def listed(self, url: str) -> list[StoredObject]:
    """Lists the object of that name, those below it, or those that a glob matches; may be none.
    Raises UserError: the store does not answer, or refuses to."""
    path = _path(url)
    ask = self.system.glob if glob.has_magic(path) else self.system.find
    result = self._tried(url, lambda: ask(path, detail=True))
    if not result:
      # Which is said of a bucket alone: what it holds may not be for everyone to see.
      bucket = path.partition("/")[0]
      self._tried(f"{self.store.name}://{bucket}", lambda: self.system.info(bucket))
    # Folders are no objects, or empty ones.
    files = [info for info in result.values() if info["type"] == "file"]
    return [self._object(info) for info in files if not info["name"].endswith("/")]

  def read(self, ranges: Sequence[Range]) -> list[bytes]:
    """Reads all ranges, requested at once. Raises UserError: the store does not send them."""
    contents: dict[int, bytes] = {}

    def read_missing() -> None:
      left = [number for number in range(len(ranges)) if number not in contents]
      wanted = [ranges[number] for number in left]
      answers = self.system.cat_ranges(
        [_path(each.url) for each in wanted],
        [each.start for each in wanted],
        [each.stop for each in wanted],
        on_error="return",
      )
      failed = None
      for number, each, answer in zip(left, wanted, answers, strict=True):
        if isinstance(answer, bytes) and len(answer) == each.stop - each.start:
          contents[number] = answer
        elif isinstance(answer, bytes):
          what = f"{len(answer)} bytes instead of {each.stop - each.start}"
          failed = failed or _FailedError(each.url, ShortAnswerError(what))
        else:
          failed = failed or _FailedError(each.url, answer)
      if failed:
        raise failed

    self._tried(ranges[0].url, read_missing)
    return [contents[number] for number in range(len(ranges))]

  def current(self, url: str) -> StoredObject:
    """Returns what the store says of an object now. Raises UserError, see `listed`."""
    return self._object(self._tried(url, lambda: self.system.info(_path(url), refresh=True)))

  def has_md5(self, url: str) -> bool:
    """Returns whether what is listed as an object's MD5 is one. Raises UserError, see `listed`."""
    return self._tried(url, lambda: self.store.has_md5(self.system, _path(url)))

  def _object(self, info: Mapping[str, Any]) -> StoredObject:
    version, md5 = self.store.version(info), self.store.md5(info)
    return StoredObject(info["name"], int(info["size"]), version, md5)

  def _tried(self, url: str, request: Callable[[], _T]) -> _T:
    """Sends a request, again while that may help, and returns the answer."""
    number, wait = 1, FIRST_WAIT_SECONDS
    while True:
      try:
        return request()
      except (_FailedError, *self.store.errors()) as caught:
        failed = caught if isinstance(caught, _FailedError) else _FailedError(url, caught)
      error = failed.error
      if not isinstance(error, (ShortAnswerError, *self.store.errors())):
        raise error
      if not isinstance(error, ShortAnswerError) and self.store.is_final(error):
        raise self._refused(failed.url, error) from error
      said = f"{failed.url}: {self.store.endpoint(self.system)} failed: {_said(error)}"
      if number == TRIES:
        raise UserError(
          f"{self.key}: {said}; {TRIES} tries were made. What is tokenized is kept: start again "
          "when the store answers, or check the address and the network"
        ) from error
      _log.warning("%s; try %d of %d follows in %.1f s", said, number + 1, TRIES, wait)
      # Not all processes at the same moment.
      time.sleep(wait * random.uniform(0.75, 1.0))
      number, wait = number + 1, 2 * wait

  def _refused(self, url: str, error: Exception) -> UserError:
    given = f"{self.key}: {url}: {self.store.endpoint(self.system)}"
    if isinstance(error, FileNotFoundError):
      return UserError(f"{given} has no such bucket or object; give one that exists")
    if isinstance(error, PermissionError):
      return UserError(
        f"{given} denies access ({_said(error)}); give credentials that may list and read it, as "
        f"{self.store.credentials}"
      )
    return UserError(
      f"{given}: {_said(error)}; check the URL, and that credentials are given by "
      f"{self.store.credentials}"
    )


def _path(url: str) -> str:
  return url.partition(_SEPARATOR)[2]


def _said(error: Exception) -> str:
  text = " ".join(str(error).split())[:300]
  return f"{type(error).__name__}: {text}" if text else type(error).__name__


def names_within(root: str, paths: Sequence[str]) -> Iterator[tuple[str, str]]:
  """Yields every path with its part below `root`; those in hidden folders are left out."""
  for path in paths:
    name = str(PurePosixPath(path).relative_to(root))
    folders = name.split("/")[:-1]
    if not any(each.startswith(".") or each == "__pycache__" for each in folders):
      yield path, name
