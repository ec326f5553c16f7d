"""Objects below one prefix of one bucket: read, write, create once, compare and swap, list, move files.

Every request is tried again with growing, jittered pauses while the server is busy or away, for
minutes rather than boto3's second, and then gives up with a sentence. A `Store` may be used from many
threads. Not for what objects mean (`dflash.layout`), nor for folders of files (`.commit`).
"""

import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import boto3
import orjson
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from dflash.errors import ConfigurationError, TemporaryError
from dflash.storage.faults import (
    Corrupt,
    Kind,
    NotFound,
    final_error,
    is_disk_full,
    is_unknown_outcome,
    kind_of,
)
from dflash.storage.keys import check_key
from dflash.storage.location import StoreLocation

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

__all__ = ["Corrupt", "Credentials", "FileRecord", "NotFound", "ObjectInfo", "Store"]

PATIENCE_SECONDS = 180.0
"""How long a request is tried again while the server is busy or away."""
_DISK_FULL_PATIENCE_SECONDS = 20.0
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 20.0
_READ_TIMEOUT_SECONDS = 60.0
_LEAST_READ_TIMEOUT_SECONDS = 10.0
_QUIET_SECONDS = 5.0
_PART_BYTES = 32 << 20
_PART_THREADS = 4
_CHUNK_BYTES = 1 << 20
_UNFINISHED_UPLOAD_AGE = timedelta(days=1)

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Credentials:
    """An access key that does not come from the environment."""

    access_key_id: str
    secret_access_key: str


@dataclass(frozen=True)
class ObjectInfo:
    """One object of a listing; `key` is relative to the store's prefix, `size` in bytes."""

    key: str
    size: int
    etag: str
    modified: datetime


@dataclass(frozen=True)
class FileRecord:
    """What is needed to fetch a file and to know that it is the right one."""

    key: str
    size: int
    sha256: str


class Store:
    """Objects below a location's prefix. Keys are relative to it."""

    def __init__(
        self, location: StoreLocation, credentials: Credentials | None, patience: float, client: "S3Client"
    ) -> None:
        self.location = location
        self._credentials = credentials
        self._patience = patience
        self._client = client

    @classmethod
    def open(
        cls,
        location: StoreLocation,
        credentials: Credentials | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> "Store":
        """A store at `location`; sends nothing yet (see `check`).

        Credentials default to the usual AWS variables and files. `patience` is in seconds.
        """
        # Whoever is impatient is not to wait a minute for a server that has accepted and says nothing.
        read_timeout = min(_READ_TIMEOUT_SECONDS, max(patience, _LEAST_READ_TIMEOUT_SECONDS))
        return cls(location, credentials, patience, _client(location, credentials, read_timeout))

    def under(self, folder: str) -> "Store":
        """The same store, one folder deeper."""
        return Store(self.location.under(check_key(folder)), self._credentials, self._patience, self._client)

    def in_bucket(self, bucket: str) -> "Store":
        """The root of another bucket at the same server, with the same credentials: where prompts may lie."""
        location = self.location.model_copy(update={"bucket": bucket, "prefix": "", "folder": None})
        return Store(location, self._credentials, self._patience, self._client)

    # Reading

    def get(self, key: str) -> bytes:
        """An object's bytes. NotFound where there is none."""
        return self.read(key)[0]

    def read(self, key: str) -> tuple[bytes, str]:
        """An object's bytes and its entity tag, for `swap`. NotFound where there is none."""
        full = self._full(key)

        def request() -> tuple[bytes, str]:
            answer = self._client.get_object(Bucket=self.location.bucket, Key=full)
            return answer["Body"].read(), answer["ETag"]

        return self._try("get", full, request)

    def get_json(self, key: str) -> Any:
        """A JSON object. NotFound where there is none, Corrupt where it is not JSON."""
        data = self.get(key)
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise Corrupt(f"{self._name(key)} is not JSON ({error}): delete it, then run again") from None

    def find_json(self, key: str) -> dict[str, Any] | None:
        """A JSON object, or None where there is none."""
        try:
            found = self.get_json(key)
        except NotFound:
            return None
        if not isinstance(found, dict):
            raise Corrupt(f"{self._name(key)} holds no JSON object: delete it, then run again")
        return found

    def exists(self, key: str) -> bool:
        """Whether an object has this key."""
        full = self._full(key)
        try:
            self._try("head", full, lambda: self._client.head_object(Bucket=self.location.bucket, Key=full))
        except NotFound:
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose keys start with `prefix`, in key order, however many pages they fill."""
        full = self._full(prefix) if prefix else self._root
        token: str | None = None
        while True:
            arguments = {"ContinuationToken": token} if token else {}

            def request(arguments: dict[str, Any] = arguments) -> Any:
                return self._client.list_objects_v2(Bucket=self.location.bucket, Prefix=full, **arguments)

            page = self._try("list", full, request)
            for found in page.get("Contents", []):
                key = found["Key"]
                if not key.startswith(full):
                    raise Corrupt(
                        f"listing {self.location.bucket}/{full} at {self.location.server} gave {key!r}, "
                        "which is not below it: the server changes keys; use a prefix of plain letters "
                        "and digits"
                    )
                yield ObjectInfo(key[len(self._root) :], found["Size"], found["ETag"], found["LastModified"])
            if not page.get("IsTruncated"):
                return
            following = page.get("NextContinuationToken")
            if not following or following == token:
                raise Corrupt(
                    f"listing {self.location.bucket}/{full} at {self.location.server} says that there is "
                    "more but gives no way to get it: this server's listing cannot be used"
                )
            token = following

    # Writing

    def put(self, key: str, data: bytes) -> str:
        """Write an object, replacing what was there; gives its entity tag."""
        full = self._new(key)
        request = lambda: self._client.put_object(Bucket=self.location.bucket, Key=full, Body=data)  # noqa: E731
        return self._try("put", full, request)["ETag"]

    def put_json(self, key: str, value: Any) -> str:
        """Write a JSON object (anything orjson takes, with sorted keys)."""
        return self.put(key, to_json(value))

    def create(self, key: str, data: bytes) -> bool:
        """Write an object only where none is: True when `data` is what stands there afterwards.

        An answer may get lost after the server has written, so a refusal is not believed before the
        object was read back: our own bytes mean success.
        """
        return self._create(key, data) is not None

    def swap(self, key: str, data: bytes, etag: str | None) -> str | None:
        """Replace the object that had `etag` when it was read (None: create it); None when someone was "
        "faster.

        Gives the new entity tag.
        """
        if etag is None:
            return self._create(key, data)
        full = self._new(key)
        attempt = _Attempt()

        def request() -> str | None:
            try:
                answer = self._client.put_object(
                    Bucket=self.location.bucket, Key=full, Body=data, IfMatch=etag
                )
            except ClientError as error:
                kind = kind_of(error)
                if kind is Kind.NOT_FOUND:
                    return None
                if kind is not Kind.PRECONDITION:
                    raise
                # Equal bytes are ours only if an earlier try may have landed: two processes that write
                # the same thing must not both believe that they were first.
                return self._etag_if_equal(full, data) if attempt.may_have_landed else None
            return answer["ETag"]

        return self._try("swap", full, request, attempt)

    def _create(self, key: str, data: bytes) -> str | None:
        full = self._new(key)

        def request() -> str | None:
            try:
                answer = self._client.put_object(
                    Bucket=self.location.bucket, Key=full, Body=data, IfNoneMatch="*"
                )
            except ClientError as error:
                if kind_of(error) is not Kind.PRECONDITION:
                    raise
                return self._etag_if_equal(full, data)
            return answer["ETag"]

        return self._try("create", full, request)

    def _etag_if_equal(self, full: str, data: bytes) -> str | None:
        try:
            answer = self._client.get_object(Bucket=self.location.bucket, Key=full)
            return answer["ETag"] if answer["Body"].read() == data else None
        except ClientError as error:
            if kind_of(error) is Kind.NOT_FOUND:
                return None
            raise

    def delete(self, key: str) -> None:
        """Delete an object; nothing happens where there is none."""
        full = self._full(key)
        try:
            self._try(
                "delete", full, lambda: self._client.delete_object(Bucket=self.location.bucket, Key=full)
            )
        except NotFound:
            return

    # Files

    def upload_file(self, key: str, path: Path) -> FileRecord:
        """Write a file as an object, in parts when it is large."""
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        size = path.stat().st_size
        if size <= _PART_BYTES:
            self.put(key, path.read_bytes())
        else:
            self._upload_in_parts(self._new(key), path, size)
        return FileRecord(key, size, sha256)

    def _upload_in_parts(self, full: str, path: Path, size: int) -> None:
        bucket = self.location.bucket
        upload = self._try(
            "start upload", full, lambda: self._client.create_multipart_upload(Bucket=bucket, Key=full)
        )["UploadId"]

        def send(number: int) -> Any:
            with path.open("rb") as file:
                file.seek((number - 1) * _PART_BYTES)
                body = file.read(_PART_BYTES)
            answer = self._try(
                f"upload part {number}",
                full,
                lambda: self._client.upload_part(
                    Bucket=bucket, Key=full, UploadId=upload, PartNumber=number, Body=body
                ),
            )
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            with ThreadPoolExecutor(_PART_THREADS, "upload") as pool:
                parts = list(pool.map(send, range(1, -(-size // _PART_BYTES) + 1)))
            self._complete(full, upload, parts, size)
        except BaseException:
            self._abort(full, upload)
            raise

    def _complete(self, full: str, upload: str, parts: Sequence[Any], size: int) -> None:
        bucket = self.location.bucket
        try:
            self._try(
                "complete upload",
                full,
                lambda: self._client.complete_multipart_upload(
                    Bucket=bucket, Key=full, UploadId=upload, MultipartUpload={"Parts": parts}
                ),
            )
        except (NotFound, ConfigurationError):
            # A first try whose answer got lost has ended the upload, so the second finds none.
            found = self._try("head", full, lambda: self._client.head_object(Bucket=bucket, Key=full))
            if found["ContentLength"] != size:
                raise

    def _abort(self, full: str, upload: str) -> None:
        try:
            self._client.abort_multipart_upload(Bucket=self.location.bucket, Key=full, UploadId=upload)
        except (ClientError, BotoCoreError) as error:
            log.warning("unfinished upload of %s is left at %s: %s", full, self.location.server, error)

    def download_file(self, record: FileRecord, path: Path) -> None:
        """Fetch a file and verify size and sha256; `path` appears only when it is right.

        NotFound where the object is gone, Corrupt where it is not the one that was recorded.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{random.getrandbits(32):08x}.partial")
        full = self._full(record.key)
        try:
            digest, size = self._download(full, partial)
            if (digest, size) != (record.sha256, record.size):
                raise Corrupt(
                    f"{self._name(record.key)} has {size} bytes with sha256 {digest}, but {record.size} "
                    f"bytes with {record.sha256} were committed: the object was changed or torn; delete what "
                    "it belongs to, then run again"
                )
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def fetch(self, key: str, path: Path) -> FileRecord:
        """Fetch an object of which nothing is known yet, such as a file of prompts, and say what it was."""
        digest, size = self._download(self._full(key), path)
        return FileRecord(key, size, digest)

    def _download(self, full: str, path: Path) -> tuple[str, int]:
        digest, etag = hashlib.sha256(), ""
        with path.open("wb") as file:

            def request() -> None:
                nonlocal digest, etag
                bucket, start = self.location.bucket, file.tell()
                if start:  # a connection broke here: go on, if that is possible and it is the same object
                    answer = self._client.get_object(Bucket=bucket, Key=full, Range=f"bytes={start}-")
                    ranged = answer["ResponseMetadata"]["HTTPStatusCode"] == 206 and answer["ETag"] == etag
                if not start or not ranged:
                    answer = self._client.get_object(Bucket=bucket, Key=full)
                    file.seek(0)
                    file.truncate()
                    digest = hashlib.sha256()
                etag = answer["ETag"]
                for chunk in answer["Body"].iter_chunks(_CHUNK_BYTES):
                    file.write(chunk)
                    digest.update(chunk)

            self._try("download", full, request)
            return digest.hexdigest(), file.tell()

    # Care

    def check(self, deadline: float = 15.0) -> None:
        """Find out, within `deadline` seconds, whether objects can be written, read, listed and deleted here.

        ConfigurationError or TemporaryError with what is wrong. Also ends uploads that were left
        unfinished below this prefix for more than a day.
        """
        # Half the time for one answer, so that a server that accepts and says nothing is found in time.
        client = _client(self.location, self._credentials, deadline / 2)
        quick = Store(self.location, self._credentials, deadline / 2, client)
        key = f"check-{random.getrandbits(64):016x}"
        next(quick.list(key), None)  # first, because its errors name the bucket
        quick.put(key, b"check")
        try:
            found = quick.get(key)
            listed = [info.key for info in quick.list(key)]
        finally:
            quick.delete(key)
        if found != b"check":
            raise ConfigurationError(
                f"{self.location.uri} at {self.location.server} gave back other bytes than were written "
                f"({found[:80]!r}): "
                "the server stores checksum trailers as data; use a newer one"
            )
        if listed != [key]:
            raise ConfigurationError(
                f"{self.location.uri} at {self.location.server} does not list the key just written "
                f"({key!r}, but "
                f"{listed!r}): use a prefix of plain letters and digits"
            )
        quick._abort_unfinished()

    def _abort_unfinished(self) -> None:
        before = datetime.now(UTC) - _UNFINISHED_UPLOAD_AGE
        try:
            answer = self._client.list_multipart_uploads(Bucket=self.location.bucket, Prefix=self._root)
        except ClientError as error:  # not every server has it, and nothing depends on it
            log.info("unfinished uploads cannot be listed at %s: %s", self.location.server, error)
            return
        for upload in answer.get("Uploads", []):
            if upload["Initiated"] < before:
                self._abort(upload["Key"], upload["UploadId"])

    @property
    def _root(self) -> str:
        return f"{self.location.prefix}/" if self.location.prefix else ""

    def _full(self, key: str) -> str:
        return self._root + key

    def _new(self, key: str) -> str:
        # Only what we write is held to the safe alphabet: people's own files are read as they are.
        return self._root + check_key(key)

    def _name(self, key: str) -> str:
        return f"s3://{self.location.bucket}/{self._root}{key} at {self.location.server}"

    def _try(
        self, operation: str, full: str, request: Callable[[], T], attempt: "_Attempt | None" = None
    ) -> T:
        """Do one request, again and again while that can help and the store's patience lasts."""
        started = time.monotonic()
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return request()
            except (ClientError, BotoCoreError) as error:
                kind = kind_of(error)
                if kind is Kind.NOT_FOUND:
                    raise NotFound(
                        f"s3://{self.location.bucket}/{full} does not exist at {self.location.server}"
                    ) from None
                if kind is not Kind.AGAIN:
                    raise final_error(error, self.location, operation, full) from error
                full_disk = is_disk_full(error, self.location)
                patience = min(self._patience, _DISK_FULL_PATIENCE_SECONDS) if full_disk else self._patience
                waited = time.monotonic() - started
                if waited + pause > patience:
                    raise self._gave_up(operation, full, waited, error, full_disk) from error
                if attempt is not None and is_unknown_outcome(error):
                    attempt.may_have_landed = True
                # Said aloud once it takes longer than a busy server usually needs.
                level = logging.INFO if waited < _QUIET_SECONDS else logging.WARNING
                log.log(
                    level, "%s of %s: %s; trying again for %.0f s", operation, full, error, patience - waited
                )
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _gave_up(
        self, operation: str, full: str, waited: float, error: Exception, full_disk: bool
    ) -> TemporaryError:
        doing = f"{operation} of s3://{self.location.bucket}/{full} at {self.location.server}"
        if full_disk:
            where = f"under {self.location.folder}" if self.location.folder else "there"
            return TemporaryError(
                f"disk full: {doing} failed ({error}); free some space {where} and run again"
            )
        return TemporaryError(
            f"{doing} still fails after {waited:.0f} s ({error}); see whether the server is up and "
            "reachable, then run again"
        )


def _client(location: StoreLocation, credentials: Credentials | None, read_timeout: float) -> "S3Client":
    # Checksums "when required": since boto3 1.36 each put otherwise carries a trailer that many
    # servers refuse with errors about credentials, or store as part of the object.
    checksums: Literal["when_supported", "when_required"] = (
        "when_supported" if location.is_aws else "when_required"
    )
    config = Config(
        request_checksum_calculation=checksums,
        response_checksum_validation=checksums,
        s3={"addressing_style": location.addressing_style},
        retries={"total_max_attempts": 1, "mode": "standard"},  # tried again by Store, for minutes
        connect_timeout=min(5.0, read_timeout),
        read_timeout=read_timeout,
        max_pool_connections=32,
        tcp_keepalive=True,
    )
    region = location.region or (None if location.is_aws else "us-east-1")
    try:
        return boto3.session.Session().client(
            "s3",
            endpoint_url=location.endpoint,
            region_name=region,
            config=config,
            aws_access_key_id=credentials.access_key_id if credentials else None,
            aws_secret_access_key=credentials.secret_access_key if credentials else None,
        )
    except (BotoCoreError, ValueError) as error:
        told = final_error(error, location, "opening", location.prefix)
        if told is error:
            told = ConfigurationError(
                f"cannot use {location.uri} at {location.server}: {error}; check spec.storage"
            )
        raise told from error


@dataclass
class _Attempt:
    """Whether an earlier try of the same request may have been carried out."""

    may_have_landed: bool = False


def to_json(value: Any) -> bytes:
    """JSON bytes that are equal for equal values."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY)
