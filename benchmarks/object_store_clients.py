"""The clients of S3 that are timed: each as its own documentation says, with its defaults, in the same process.

A client moves one object: from a file to the service, from there into memory or into a file. Whatever a program would
do once, before the first transfer, its constructor does.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from measure import only_installed

__all__ = ["CLIENTS", "Client", "Service"]

MIB = 1 << 20
PIECE = MIB
RENAME_SECONDS = 60.0


@dataclass(frozen=True)
class Service:
    """Where the service is, and whose bucket it is. The credentials are in the environment.

    Attributes:
        endpoint_url: as in ``http://127.0.0.1:12345``.
    """

    endpoint_url: str
    access_key: str
    secret_key: str
    region: str
    bucket: str


class Client(ABC):
    """How one library moves an object.

    Attributes:
        distribution: name of its package.
        flushes: whether a file that it has downloaded is on the disk. Where not, the benchmark flushes it.
    """

    distribution: ClassVar[str]
    flushes: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, service: Service) -> None: ...

    @abstractmethod
    def upload(self, name: str, path: Path) -> None:
        """Make the file ``path`` the object ``name``."""

    @abstractmethod
    def read(self, name: str, memory: memoryview) -> None:
        """Have the object ``name``, which is as large as ``memory``, in memory: there, or in that of the client."""

    @abstractmethod
    def download(self, name: str, path: Path) -> None:
        """Make the object ``name`` the file ``path``, which does not exist."""

    def close(self) -> None:
        """End what the constructor began."""


class Composerlite(Client):
    """A Transfer, as Trainer uses it: checksums of all parts, retries, and a file that appears whole and durable."""

    distribution = "composerlite"
    flushes = True

    def __init__(self, service: Service) -> None:
        from composerlite.storage import Transfer, open_store

        self.store = open_store(f"s3://{service.bucket}", endpoint_url=service.endpoint_url)
        self.transfer = Transfer(self.store)

    def upload(self, name: str, path: Path) -> None:
        self.transfer.upload(name, path)

    def read(self, name: str, memory: memoryview) -> None:
        from composerlite.storage.disk.memory import address_of

        self.transfer.read_into(name, [(0, address_of(memory), memory.nbytes)])

    def download(self, name: str, path: Path) -> None:
        self.transfer.download(name, path)

    def close(self) -> None:
        self.transfer.close()
        self.store.close()


class Boto3(Client):
    """boto3 with one request for the whole object."""

    distribution = "boto3"

    def __init__(self, service: Service) -> None:
        import boto3
        from botocore.config import Config

        self.bucket = service.bucket
        config = Config(s3={"addressing_style": "path"}, max_pool_connections=20)
        self.client: Any = boto3.client("s3", endpoint_url=service.endpoint_url, config=config)

    def upload(self, name: str, path: Path) -> None:
        with path.open("rb") as file:
            self.client.put_object(Bucket=self.bucket, Key=name, Body=file)

    def read(self, name: str, memory: memoryview) -> None:
        body = self.client.get_object(Bucket=self.bucket, Key=name)["Body"]
        at = 0
        while count := body.readinto(memory[at : at + PIECE]):
            at += count
        assert at == memory.nbytes

    def download(self, name: str, path: Path) -> None:
        body = self.client.get_object(Bucket=self.bucket, Key=name)["Body"]
        with path.open("wb") as file:
            for piece in body.iter_chunks(PIECE):
                file.write(piece)

    def close(self) -> None:
        self.client.close()


class Boto3Transfer(Boto3):
    """``upload_file`` and ``download_file``: parts of 8 MB, ten threads."""

    def __init__(self, service: Service) -> None:
        from boto3.s3.transfer import TransferConfig

        super().__init__(service)
        self.config = TransferConfig(preferred_transfer_client="classic")

    def upload(self, name: str, path: Path) -> None:
        self.client.upload_file(str(path), self.bucket, name, Config=self.config)

    def read(self, name: str, memory: memoryview) -> None:
        self.client.download_fileobj(self.bucket, name, Memory(memory), Config=self.config)

    def download(self, name: str, path: Path) -> None:
        self.client.download_file(self.bucket, name, str(path), Config=self.config)


class Boto3Crt(Client):
    """The transfers of Amazon's common runtime, below boto3.

    What boto3 makes for ``preferred_transfer_client="crt"``, which goes to Amazon whatever ``endpoint_url`` says.
    """

    distribution = "awscrt"

    def __init__(self, service: Service) -> None:
        import botocore
        import botocore.session
        from botocore.config import Config
        from botocore.credentials import Credentials
        from s3transfer.crt import (
            BotocoreCRTCredentialsWrapper,
            BotocoreCRTRequestSerializer,
            CRTTransferManager,
            create_s3_crt_client,
        )

        self.bucket = service.bucket
        credentials = BotocoreCRTCredentialsWrapper(Credentials(service.access_key, service.secret_key))
        client = create_s3_crt_client(
            region=service.region,
            crt_credentials_provider=credentials.to_crt_credentials_provider(),
            use_ssl=False,
        )
        config = Config(s3={"addressing_style": "path"}, signature_version=botocore.UNSIGNED)
        where = {"region_name": service.region, "endpoint_url": service.endpoint_url, "config": config}
        serializer = BotocoreCRTRequestSerializer(botocore.session.get_session(), where)
        self.manager = CRTTransferManager(client, serializer)

    def upload(self, name: str, path: Path) -> None:
        self.manager.upload(str(path), self.bucket, name).result()

    def read(self, name: str, memory: memoryview) -> None:
        self.manager.download(self.bucket, name, Memory(memory)).result()

    def download(self, name: str, path: Path) -> None:
        from s3transfer.subscribers import BaseSubscriber

        renamed = threading.Event()  # the file has its name only some time after the result is there

        class Done(BaseSubscriber):
            def on_done(self, future: Any, **kwargs: Any) -> None:
                renamed.set()

        self.manager.download(self.bucket, name, str(path), subscribers=[Done()]).result()
        if not renamed.wait(RENAME_SECONDS):
            raise TimeoutError(f"{path}: downloaded, and not there {RENAME_SECONDS:.0f} s later")

    def close(self) -> None:
        self.manager.shutdown()


class Obstore(Client):
    """obstore, the object stores of Rust's arrow."""

    distribution = "obstore"

    def __init__(self, service: Service) -> None:
        from obstore.store import S3Store

        self.store = S3Store(
            service.bucket,
            endpoint=service.endpoint_url,
            access_key_id=service.access_key,
            secret_access_key=service.secret_key,
            region=service.region,
            client_options={"allow_http": True},
            virtual_hosted_style_request=False,
        )

    def upload(self, name: str, path: Path) -> None:
        import obstore

        obstore.put(self.store, name, path)

    def read(self, name: str, memory: memoryview) -> None:
        import obstore

        starts = range(0, memory.nbytes, 16 * MIB)
        ends = [min(start + 16 * MIB, memory.nbytes) for start in starts]
        found = obstore.get_ranges(self.store, name, starts=list(starts), ends=ends, coalesce=0)
        assert sum(map(len, found)) == memory.nbytes

    def download(self, name: str, path: Path) -> None:
        import obstore

        with path.open("wb") as file:
            for piece in obstore.get(self.store, name).stream(min_chunk_size=8 * MIB):
                file.write(piece)


class ObstoreWhole(Obstore):
    """obstore with one request for the whole object."""

    def upload(self, name: str, path: Path) -> None:
        import obstore

        obstore.put(self.store, name, path, use_multipart=False)

    def read(self, name: str, memory: memoryview) -> None:
        import obstore

        assert len(obstore.get(self.store, name).bytes()) == memory.nbytes


class S3Torch(Client):
    """The streams of Amazon's connector for PyTorch."""

    distribution = "s3torchconnector"

    def __init__(self, service: Service) -> None:
        from s3torchconnector import S3Checkpoint, S3ClientConfig

        self.address = f"s3://{service.bucket}"
        config = S3ClientConfig(force_path_style=True)
        self.client: Any = S3Checkpoint(service.region, endpoint=service.endpoint_url, s3client_config=config)

    def upload(self, name: str, path: Path) -> None:
        with path.open("rb") as file, self.client.writer(f"{self.address}/{name}") as writer:
            while piece := file.read(8 * MIB):
                writer.write(piece)

    def read(self, name: str, memory: memoryview) -> None:
        reader = self.client.reader(f"{self.address}/{name}")
        at = 0
        while count := reader.readinto(memory[at : at + 8 * MIB]):
            at += count
        assert at == memory.nbytes

    def download(self, name: str, path: Path) -> None:
        reader = self.client.reader(f"{self.address}/{name}")
        with path.open("wb") as file:
            while piece := reader.read(8 * MIB):
                file.write(piece)


class Memory:
    """A file that is memory, for clients that write to files."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._at = 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._memory.nbytes}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def write(self, data: bytes | memoryview) -> int:
        end = self._at + len(data)
        self._memory[self._at : end] = data
        self._at = end
        return len(data)


CLIENTS = only_installed(
    {
        "composerlite": Composerlite,
        "boto3, one request": Boto3,
        "boto3, parts": Boto3Transfer,
        "boto3 with CRT": Boto3Crt,
        "obstore, parts": Obstore,
        "obstore, one request": ObstoreWhole,
        "s3torchconnector": S3Torch,
    }
)
