"""`python -m operators`: the operator.

`python -m operators crd` writes the CRD into the cluster and `python -m operators delete NAME...` deletes
Drafters and waits until they are gone (both for Helm hooks); `python -m operators probe URI` tries what the
store at an s3:// address can do (for `helm test`).
"""

import json
import logging
import os
import signal
import sys
import time
from typing import Any

from dflash.errors import ConfigurationError, DflashError, TemporaryError
from dflash.resource.storage import Storage
from dflash.storage.location import location_of
from dflash.storage.probe import probe
from dflash.storage.store import Store
from operators.crd import SCHEMA_HASH, crd, missing_fields
from operators.kube import DEFINITIONS, DRAFTERS, ApiError, Kube, NotFound, Unreachable
from operators.manager import Manager
from operators.settings import OperatorSettings
from operators.view import StoreView

log = logging.getLogger("operators")

_API_SECONDS = 600.0
_CRD_SECONDS = 60.0
_DELETION_SECONDS = 240.0


class JsonLines(logging.Formatter):
    """One JSON object a line, with the Drafter's name where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        drafter = getattr(record, "drafter", None)
        if drafter:
            entry["drafter"] = drafter
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def main() -> int:
    """Run; the exit code is 0 after SIGTERM, 1 when the Lease is lost, 78 when the CRD is too old."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        return run(sys.argv[1:])
    except DflashError as error:
        log.error("%s", error)
        return int(error.exit_code)


def run(arguments: list[str]) -> int:
    """Do as the command line says."""
    if arguments[:1] == ["probe"]:
        return probe_store(arguments[1])
    kube = Kube.connect()
    if arguments == ["crd"]:
        definition = crd()
        kube.apply(DEFINITIONS, "", definition)
        log.info(
            "%s is at schema %s",
            definition["metadata"]["name"],
            definition["metadata"]["annotations"][SCHEMA_HASH],
        )
        return 0
    if arguments[:1] == ["delete"]:
        delete_drafters(kube, os.environ["DFLASH_OPERATOR_NAMESPACE"], arguments[1:])
        return 0
    lacking = _lacking(kube)
    if lacking:
        log.error(
            "the cluster's CRD is older than this operator: it lacks %s and would drop them silently. Helm "
            "does not upgrade CRDs: run `kubectl apply --server-side --force-conflicts -f charts/crds/`, or "
            "set crds.upgrade=true in the chart",
            ", ".join(lacking[:5]),
        )
        return 78
    settings = OperatorSettings()
    manager = Manager(kube, settings, StoreView(f"{kube.cluster_id()}/{settings.namespace}"))
    signal.signal(signal.SIGTERM, lambda *_: manager.stop())
    signal.signal(signal.SIGINT, lambda *_: manager.stop())
    kept = manager.run()
    if not kept:
        log.error("the lease %s is lost: another operator may act now, so this one ends", settings.lease)
    logging.shutdown()
    sys.stderr.flush()
    # Not sys.exit: a worker that waits for the store must not keep a process that may no longer act.
    os._exit(0 if kept else 1)


def _lacking(kube: Kube) -> list[str]:
    """Fields that the cluster's CRD lacks, waiting for an API server that is away.

    To end would be to be started again after ever longer pauses, and to come back late.
    """
    started = time.monotonic()
    while True:
        waited = time.monotonic() - started
        try:
            return missing_fields(kube)
        except NotFound as error:  # a CRD that was installed a moment ago is published a little later
            if waited > _CRD_SECONDS:
                raise ConfigurationError(
                    f"the CRD is not installed ({error.message}): kubectl apply --server-side -f charts/crds/"
                ) from error
            log.warning("waiting for the CRD: %s", error.message)
        except (Unreachable, ApiError) as error:
            if waited > _API_SECONDS:
                raise TemporaryError(
                    f"the API server has not answered for {waited:.0f} s: {error}"
                ) from error
            log.warning("waiting for the API server: %s", error)
        time.sleep(2.0)


def delete_drafters(kube: Kube, namespace: str, drafters: list[str]) -> None:
    """Delete Drafters while there is an operator that deletes their data; TemporaryError after a while."""
    for name in drafters:
        kube.delete(DRAFTERS, namespace, name)
    started = time.monotonic()
    while left := [name for name in drafters if kube.find(DRAFTERS, namespace, name)]:
        if time.monotonic() - started > _DELETION_SECONDS:
            raise TemporaryError(
                f"after {_DELETION_SECONDS:.0f} s these Drafters are still there: {', '.join(left)}; see "
                "`kubectl describe drafter`, then run again"
            )
        time.sleep(1.0)


def probe_store(uri: str) -> int:
    """0 when the store does all that exactly-once needs; what is missing is told in sentences."""
    store = Store.open(location_of(Storage(uri=uri)), patience=60.0)
    found = probe(store)
    for sentence in found.missing:
        log.error("%s", sentence)
    if found.ok:
        log.info("%s creates once, compares and swaps, and lists what was written", uri)
    return 0 if found.ok else 1


if __name__ == "__main__":
    sys.exit(main())
