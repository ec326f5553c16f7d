"""What an S3 server's or a network's failure means: wait and try again, or tell the person at once.

Pure: from an exception of boto3 to a kind and a sentence. The retrying itself is in `.store`.
"""

import shutil
from enum import Enum
from pathlib import Path

from botocore import exceptions as boto

from dflash.errors import ConfigurationError, DflashError
from dflash.storage.location import StoreLocation

_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (on a cluster: the Secret of spec.storage.secretRef)"
)
_REFUSED = {
    "403",
    "401",
    "AccessDenied",
    "ExpiredToken",
    "Forbidden",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "Unauthorized",
}
_WRONG_REGION = {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}
_AGAIN = {  # with status 4xx, so not told by the status alone
    "BadDigest",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "OperationAborted",
    "RequestTimeout",
    "RequestTimeoutException",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
_DISK_FULL = ("no space left", "no writable volumes", "no free volumes", "disk full", "xminiostoragefull")


MIN_FREE_BYTES = 256 << 20
"""Below this an embedded server takes nothing large any more."""


class NotFound(DflashError):  # noqa: N818
    """No object has this key."""


class Corrupt(DflashError):  # noqa: N818
    """An object's bytes are not the ones that were committed."""


class Kind(Enum):
    """What to do about a failed request."""

    NOT_FOUND = "not found"
    PRECONDITION = "precondition failed"
    AGAIN = "try again"
    FINAL = "final"


def kind_of(error: Exception) -> Kind:
    """What to do about `error`, raised by boto3 for one request."""
    if isinstance(error, boto.ClientError):
        code, status = _code(error), _status(error)
        if code in ("NoSuchKey", "404", "NotFound"):
            return Kind.NOT_FOUND
        if status == 412 or code == "PreconditionFailed":
            return Kind.PRECONDITION
        if code in _AGAIN or status in (408, 409, 429) or (status >= 500 and status != 501):
            return Kind.AGAIN
        return Kind.FINAL
    if isinstance(error, boto.SSLError):
        return (
            Kind.FINAL
            if "certificate" in str(error).lower() or "wrong_version" in str(error).lower()
            else Kind.AGAIN
        )
    if isinstance(
        error,
        boto.ConnectionError | boto.HTTPClientError | boto.IncompleteReadError | boto.ResponseStreamingError,
    ):
        return Kind.AGAIN
    return Kind.FINAL


def is_unknown_outcome(error: Exception) -> bool:
    """Whether the server may have done what was asked, though the answer says otherwise or got lost."""
    if isinstance(error, boto.ClientError):
        return _status(error) >= 500 and _code(error) != "SlowDown"
    return True


def is_disk_full(error: Exception, location: StoreLocation) -> bool:
    """Whether a failed request failed for want of space.

    SeaweedFS answers a full disk with a bare InternalError, so for an embedded server its disk is asked.
    """
    if not isinstance(error, boto.ClientError) or _status(error) < 500:
        return False
    if _status(error) == 507 or any(words in str(error).lower() for words in _DISK_FULL):
        return True
    return location.folder is not None and free_bytes(location.folder) < MIN_FREE_BYTES


def free_bytes(folder: Path) -> int:
    """Space left on the disk that holds `folder`."""
    return shutil.disk_usage(folder).free


def final_error(error: Exception, location: StoreLocation, operation: str, key: str) -> Exception:
    """The sentence for a failure that waiting does not cure; `error` itself where it is not known."""
    doing = f"{operation} of {location.bucket}/{key} at {location.server}"
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return ConfigurationError(f"no credentials for {location.server}: set {_CREDENTIALS}")
    if isinstance(error, boto.ProfileNotFound | boto.CredentialRetrievalError | boto.TokenRetrievalError):
        return ConfigurationError(
            f"cannot get credentials for {location.server} ({error}): set {_CREDENTIALS}"
        )
    if isinstance(error, boto.SSLError):
        return ConfigurationError(
            f"{doing}: TLS failed ({error}); check the scheme of spec.storage.endpoint, or name the "
            "server's authority in AWS_CA_BUNDLE"
        )
    if not isinstance(error, boto.ClientError):
        return error
    code, status = _code(error), _status(error)
    told = f"{doing} was refused with {code} (HTTP {status})"
    if code == "NoSuchBucket":
        endpoint = f" --endpoint-url {location.endpoint}" if location.endpoint else ""
        return ConfigurationError(
            f"bucket {location.bucket!r} does not exist at {location.server}: create it with "
            f"`aws{endpoint} s3 mb s3://{location.bucket}`, or correct spec.storage.uri"
        )
    if code == "RequestTimeTooSkewed":
        return ConfigurationError(f"{told}: this machine's clock is wrong; set it and run again")
    if code in _WRONG_REGION:
        return ConfigurationError(
            f"{told}: the region {location.region!r} or the addressing style {location.addressing_style!r} "
            "does not fit this server; set spec.storage.region or spec.storage.addressingStyle"
        )
    if code in _REFUSED or status in (401, 403):
        return ConfigurationError(
            f"{told}: check {_CREDENTIALS} and that they may read, write, list and delete in this bucket"
        )
    if status == 501 or code == "NotImplemented":
        return ConfigurationError(
            f"{told}: the server lacks something that was asked for ({_message(error)}); chunked bodies and "
            "checksum trailers are already off for servers other than AWS, so look for a proxy or an "
            "AWS_* variable that turns them on"
        )
    return ConfigurationError(f"{told}: {_message(error)}; check spec.storage against this server")


def _code(error: boto.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _message(error: boto.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Message", "")) or "no message"


def _status(error: boto.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
