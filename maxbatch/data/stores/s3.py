"""S3 and what speaks its protocol, by s3fs: endpoint and credentials as botocore reads them."""

import errno
import os
import re
from collections.abc import Mapping
from typing import Any

from maxbatch.data.optional import library
from maxbatch.data.stores.store import CONNECT_SECONDS, READ_SECONDS, ObjectStore

_WHAT = "s3://"
_FINAL_ERRNO = frozenset(
  {
    errno.EINVAL,  # Of s3fs, for a request that is not understood, among others.
    errno.EPERM,
    errno.ENOSYS,
    errno.EREMCHG,  # The bucket is in another region.
    errno.ENAMETOOLONG,
  }
)


def _open(what: str) -> Any:
  once = {"total_max_attempts": 1, "mode": "standard"}
  options = {
    "connect_timeout": CONNECT_SECONDS,
    "read_timeout": READ_SECONDS,
    "retries": once,
  }
  made = library("s3fs", what, extra="s3").S3FileSystem(
    use_listings_cache=False, config_kwargs=options
  )
  made.retries = 1
  return made


def _errors() -> tuple[type[Exception], ...]:
  botocore, parsers = library("botocore.exceptions", _WHAT), library("botocore.parsers", _WHAT)
  client_error = library("aiohttp", _WHAT).ClientError
  # botocore says by ValueError that an endpoint is no address.
  return (OSError, ValueError, botocore.BotoCoreError, parsers.ResponseParserError, client_error)


def _endpoint(system: Any) -> str:
  try:
    return system.s3.meta.endpoint_url
  except (ValueError, library("botocore.exceptions", _WHAT).BotoCoreError):  # It has no client.
    return os.environ.get("AWS_ENDPOINT_URL", "S3")


def _is_final(error: Exception) -> bool:
  if isinstance(error, FileNotFoundError | PermissionError | ValueError):
    return True
  exceptions = library("botocore.exceptions", _WHAT)
  passing = (
    exceptions.HTTPClientError,
    exceptions.ConnectionError,
    exceptions.IncompleteReadError,
    exceptions.FlexibleChecksumError,
  )
  if isinstance(error, exceptions.BotoCoreError):
    return not isinstance(error, passing)
  return isinstance(error, OSError) and error.errno in _FINAL_ERRNO


def _md5(info: Mapping[str, Any]) -> str:
  """An ETag that is no MD5 has a hyphen: the object was written in parts."""
  tag = str(info.get("ETag", "")).strip('"').lower()
  return tag if re.fullmatch("[0-9a-f]{32}", tag) else ""


def _has_md5(system: Any, path: str) -> bool:
  """With keys of one's own or of KMS, the ETag is of what is stored, not of what is read."""
  bucket, _, key = path.partition("/")
  head = system.call_s3("head_object", Bucket=bucket, Key=key)
  return head.get("ServerSideEncryption", "AES256") == "AES256" and (
    "SSECustomerAlgorithm" not in head
  )


S3 = ObjectStore(
  name="s3",
  open=_open,
  errors=_errors,
  is_final=_is_final,
  endpoint=_endpoint,
  version=lambda info: str(info.get("ETag") or info.get("LastModified", "")).strip('"'),
  md5=_md5,
  has_md5=_has_md5,
  credentials="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (a public bucket needs "
  "none with FSSPEC_S3_ANON=true), and the store in AWS_ENDPOINT_URL if it is not Amazon's",
)
