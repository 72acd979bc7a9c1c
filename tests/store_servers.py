"""The servers of `remote/conftest.py`, for tests in other folders, which import the fixtures from here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

_SPEC = importlib.util.spec_from_file_location("store_servers_of_remote", Path(__file__).parent / "remote/conftest.py")
assert _SPEC is not None and _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)

S3, RangeServer = _MODULE.S3, _MODULE.RangeServer
s3, s3_server, range_server = _MODULE.s3, _MODULE.s3_server, _MODULE.range_server


def put_folder(store: Any, folder: Path, prefix: str) -> str:
    """Uploads all files below a folder, or a single one; returns the URL."""
    for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
        if path.is_file():
            store.put(f"{prefix}/{path.relative_to(folder)}" if folder.is_dir() else prefix, path.read_bytes())
    return f"{store.url}/{prefix}"


def objects(store: Any) -> dict[str, bytes]:
    """All objects of the bucket: key -> bytes."""
    found = store.boto3.list_objects_v2(Bucket=store.bucket).get("Contents", [])
    return {each["Key"]: store.boto3.get_object(Bucket=store.bucket, Key=each["Key"])["Body"].read() for each in found}
