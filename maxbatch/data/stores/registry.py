"""Object stores by the scheme of their URLs."""

from maxbatch.data.stores.gcs import GCS
from maxbatch.data.stores.s3 import S3
from maxbatch.data.stores.store import ObjectStore

STORES: dict[str, ObjectStore] = {store.name: store for store in (S3, GCS)}
