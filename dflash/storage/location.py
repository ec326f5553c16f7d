"""Where a Drafter's objects are: bucket, prefix and server, normalised and checked without any network.

What a person may write in `spec.storage` is turned here into one exact form, or refused with an
example. Not for talking to a server (`dflash.storage.store`) or for starting one (`.embedded`).
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict

from dflash.errors import ConfigurationError
from dflash.resource.storage import Storage

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_FILE = "file://"
_S3 = "s3://"
FOLDER_VARIABLE = "DFLASH_STORE_FOLDER"
"""Set for the processes that use an embedded server: the folder it writes to."""


class StoreLocation(BaseModel):
    """One exact place in S3; every key of a `Store` is below its prefix."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket: str
    prefix: str = ""
    """Without a slash at either end; any characters but control characters."""
    endpoint: str | None = None
    """Scheme and authority, possibly a path; None is AWS."""
    region: str | None = None
    addressing_style: Literal["path", "virtual"] = "virtual"

    folder: Path | None = None
    """Where an embedded server of this machine keeps it, to tell a full disk from a fault; else None."""

    @property
    def uri(self) -> str:
        """s3://bucket/prefix."""
        return f"{_S3}{self.bucket}/{self.prefix}" if self.prefix else f"{_S3}{self.bucket}"

    @property
    def is_aws(self) -> bool:
        """Whether Amazon's own servers answer."""
        return self.endpoint is None or (urlsplit(self.endpoint).hostname or "").endswith(".amazonaws.com")

    @property
    def server(self) -> str:
        """The server's name in messages."""
        return self.endpoint or "AWS S3"

    def under(self, folder: str) -> "StoreLocation":
        """The same place, one folder deeper."""
        return self.model_copy(update={"prefix": f"{self.prefix}/{folder}".strip("/")})


def is_local(uri: str) -> bool:
    """Whether a storage URI names a folder of this machine."""
    return uri.startswith(_FILE) or "://" not in uri


def location_of(storage: Storage, environment: Mapping[str, str] | None = None) -> StoreLocation:
    """The place that `spec.storage` means.

    Endpoint and region default to the usual AWS variables of `environment` (default: the process's).
    ConfigurationError when the URI or the endpoint cannot be meant as written.
    """
    env = os.environ if environment is None else environment
    bucket, prefix = _split_uri(storage.uri)
    written = storage.endpoint or env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL")
    endpoint = normalise_endpoint(written, bucket) if written else None
    region = storage.region or env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION")
    location = StoreLocation(bucket=bucket, prefix=prefix, endpoint=endpoint, region=region)
    folder = env.get(FOLDER_VARIABLE)
    if folder and endpoint and endpoint == env.get("AWS_ENDPOINT_URL_S3"):
        location = location.model_copy(update={"folder": Path(folder)})
    style = storage.addressing_style
    if style == "auto":
        # A bucket in the host name needs wildcard DNS, which servers other than AWS rarely have.
        style = "virtual" if location.is_aws else "path"
    return location.model_copy(update={"addressing_style": style})


def normalise_endpoint(written: str, bucket: str = "") -> str:
    """One form for an S3 server's URL: `h:9000` gets a scheme, a slash at the end goes away."""
    where = f"spec.storage.endpoint {written!r}"
    example = "write it like http://minio:9000 or https://s3.example.com"
    text = written.strip().rstrip("/")
    if "://" not in text:
        name, _, port = text.partition(":")
        if not name or not port.isdigit():
            raise ConfigurationError(f"{where} has no scheme: {example}")
        text = f"{'https' if port == '443' else 'http'}://{text}"
    try:
        parts = urlsplit(text)
        host, _port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"{where} is not a URL ({error}): {example}") from None
    if parts.scheme not in ("http", "https"):
        raise ConfigurationError(
            f"{where} has scheme {parts.scheme!r}, which is not http or https: {example}"
        )
    if not host or _CONTROL.search(text) or " " in text:
        raise ConfigurationError(f"{where} has no valid host: {example}")
    if parts.username is not None or parts.password is not None:
        raise ConfigurationError(
            f"spec.storage.endpoint of host {host!r} has credentials in it: put them into "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (on a cluster: the Secret of spec.storage.secretRef)"
        )
    if parts.query or parts.fragment:
        raise ConfigurationError(
            f"{where} has a query or a fragment, which an endpoint cannot have: {example}"
        )
    if bucket and parts.path.strip("/").split("/")[-1] == bucket:
        raise ConfigurationError(
            f"{where} ends with the bucket's name: the bucket is named by spec.storage.uri only, so write "
            f"{parts.scheme}://{parts.netloc}"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path}"


def _split_uri(uri: str) -> tuple[str, str]:
    example = "write it like s3://bucket/prefix"
    if not uri.startswith(_S3):
        raise ConfigurationError(f"spec.storage.uri {uri!r} is not an S3 location: {example}")
    bucket, _, rest = uri.removeprefix(_S3).partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigurationError(f"spec.storage.uri {uri!r} has no valid bucket name ({bucket!r}): {example}")
    prefix = rest.strip("/")
    if _CONTROL.search(prefix):
        raise ConfigurationError(f"spec.storage.uri {uri!r} has a control character in its prefix: {example}")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise ConfigurationError(
            f"spec.storage.uri {uri!r} has an empty, '.' or '..' folder in its prefix, which some servers "
            f"change silently: {example}"
        )
    return bucket, prefix
