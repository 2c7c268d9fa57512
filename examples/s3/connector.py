"""The writer and reader of s3torchconnector, as a config file can name them: region and addressing are chosen here."""

from __future__ import annotations

from typing import Any

from s3torchconnector import S3ClientConfig
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

REGION = "us-east-1"


def config() -> S3ClientConfig:
    """A server on this machine has no bucket in its host name."""
    return S3ClientConfig(force_path_style=True)


class Writer(S3StorageWriter):
    def __init__(self, path: str, thread_count: int = 1, overwrite: bool = True) -> None:
        options: dict[str, Any] = {"thread_count": thread_count, "overwrite": overwrite}
        super().__init__(REGION, path, s3client_config=config(), **options)


class Reader(S3StorageReader):
    def __init__(self, path: str) -> None:
        super().__init__(REGION, path, s3client_config=config())
