"""Servers that the tests of remote files ask: one of ranges, in its own process, and moto's S3."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running_server import RangeServer, serving


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the file of `write_kind`, written once; tests only read it."""
    from remote_files import write_kind

    files: dict[str, Path] = {}

    def find(kind: str) -> Path:
        if kind not in files:
            files[kind] = write_kind(kind, tmp_path_factory.mktemp("kind"))
        return files[kind]

    return find


@pytest.fixture
def range_server(tmp_path: Path) -> Iterator[RangeServer]:
    """A server of the files in tmp_path/served, in its own process."""
    with serving(tmp_path / "served") as server:
        yield server


class S3:
    """moto's S3 in this process: the bucket's name, its URL, and boto3's client of it."""

    def __init__(self, endpoint: str) -> None:
        import boto3

        self.endpoint = endpoint
        self.bucket = "bucket"
        self.url = f"s3://{self.bucket}"
        self.boto3 = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        self.boto3.create_bucket(Bucket=self.bucket)

    def put(self, key: str, data: bytes) -> None:
        """Writes an object by other means than fastload's; at most 1 MiB, since a range costs moto all of it."""
        assert len(data) <= 2**20
        self.boto3.put_object(Bucket=self.bucket, Key=key, Body=data)

    def refuse(self) -> None:
        """From now on keys are checked, and the test's are unknown: 403."""
        self._moto("reset-auth", b"0")

    def _moto(self, path: str, body: bytes = b"") -> None:
        headers = {"Content-Type": "application/octet-stream"}
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(f"{self.endpoint}/moto-api/{path}", data=body, headers=headers, method="POST")
        with direct.open(request) as answer:
            answer.read()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of moto's server, for all tests of this run."""
    pytest.importorskip("moto", reason="moto is not installed: pip install 'moto[s3]' flask flask-cors")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3]:
    """An empty bucket on moto, which the AWS_* variables of the test point to; no profile is there."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a-test-key",
        "AWS_SECRET_ACCESS_KEY": "a-test-secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "no-credentials"),
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    server = S3(s3_server)
    yield server
    server._moto("reset-auth", b"10000000000")
    server._moto("reset")
