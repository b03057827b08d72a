"""Google Cloud Storage, by gcsfs: credentials as Google's libraries find them."""

import base64
import logging
from collections.abc import Mapping
from typing import Any

from maxbatch.data.optional import library
from maxbatch.data.stores.store import CONNECT_SECONDS, READ_SECONDS, ObjectStore

_WHAT = "gs://"


def _open(what: str) -> Any:
  core = library("gcsfs.core", what, extra="gcs")
  # It prints tracebacks of errors that it also raises.
  logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
  timeout = library("aiohttp", what).ClientTimeout(
    total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS
  )
  return core.GCSFileSystem(
    access="read_only", use_listings_cache=False, session_kwargs={"timeout": timeout}
  )


def _errors() -> tuple[type[Exception], ...]:
  return (
    OSError,
    ValueError,  # Of gcsfs, for a request that is not understood.
    library("gcsfs.retry", _WHAT).HttpError,
    library("google.auth.exceptions", _WHAT).GoogleAuthError,
    library("aiohttp", _WHAT).ClientError,
  )


def _is_final(error: Exception) -> bool:
  if isinstance(error, FileNotFoundError | PermissionError | ValueError):
    return True
  if isinstance(error, library("google.auth.exceptions", _WHAT).GoogleAuthError):
    return not isinstance(error, library("google.auth.exceptions", _WHAT).TransportError)
  if isinstance(error, library("gcsfs.retry", _WHAT).HttpError):
    return not library("gcsfs.retry", _WHAT).is_retriable(error)
  return str(error).startswith("Forbidden")


def _md5(info: Mapping[str, Any]) -> str:
  """Objects that were composed of others have none."""
  return base64.b64decode(info.get("md5Hash", "")).hex()


GCS = ObjectStore(
  name="gs",
  open=_open,
  errors=_errors,
  is_final=_is_final,
  endpoint=lambda system: system.base,
  version=lambda info: str(info.get("etag", "")),
  md5=_md5,
  has_md5=lambda system, path: True,
  credentials="GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login` (a "
  "public bucket needs none with FSSPEC_GS_TOKEN=anon)",
)
