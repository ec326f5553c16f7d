"""`python -m operators`: the operator. `python -m operators crd`: writes the CRD (for a Helm hook)."""

import json
import logging
import os
import signal
import sys
import time
from typing import Any

from operators.crd import SCHEMA_HASH, crd, missing_fields
from operators.kube import DEFINITIONS, Kube
from operators.manager import Manager
from operators.settings import OperatorSettings
from operators.view import StoreView

log = logging.getLogger("operators")


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
    kube = Kube.connect()
    if sys.argv[1:] == ["crd"]:
        definition = crd()
        kube.apply(DEFINITIONS, "", definition)
        log.info(
            "%s is at schema %s",
            definition["metadata"]["name"],
            definition["metadata"]["annotations"][SCHEMA_HASH],
        )
        return 0
    lacking = missing_fields(kube)
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


if __name__ == "__main__":
    sys.exit(main())
