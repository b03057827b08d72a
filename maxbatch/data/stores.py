"""Object stores by the scheme of their URLs: their fsspec file systems, and what the answers mean."""

import base64
import dataclasses
import errno
import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from maxbatch.config.registry import library

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
