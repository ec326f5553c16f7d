"""Leader election by a Lease: one operator acts, others wait; losing it ends the process.

Lease 15 s, renew deadline 10 s, retry 2 s, as Kubernetes' own controllers have it. Whether a holder
is alive is judged by this clock since the Lease was last seen to change, never by comparing clocks.
"""

import logging
import threading
import time
from datetime import UTC, datetime

from operators.kube import LEASES, ApiError, Conflict, Kube, Object, Unreachable, micro_timestamp

log = logging.getLogger(__name__)

LEASE_SECONDS, RENEW_DEADLINE, RETRY_SECONDS = 15, 10.0, 2.0


class LeaderLease:
    """This process's claim on a Lease object."""

    def __init__(self, kube: Kube, namespace: str, name: str, identity: str) -> None:
        self._kube, self._namespace, self._name, self._identity = kube, namespace, name, identity
        self._seen: tuple[str, str] | None = None
        self._seen_at = 0.0

    def acquire(self, stop: threading.Event) -> bool:
        """Wait until the Lease is ours; False when told to stop first."""
        waiting_for = ""
        while not stop.is_set():
            try:
                holder = self._try()
                if holder == self._identity:
                    return True
                if holder != waiting_for:
                    log.info("waiting for the lease, held by %s", holder)
                    waiting_for = holder
            except (ApiError, Unreachable) as error:
                log.warning("lease %s: %s", self._name, error)
            stop.wait(RETRY_SECONDS)
        return False

    def hold(self, stop: threading.Event) -> bool:
        """Renew until told to stop (True, and the Lease is released), or until it is lost (False)."""
        renewed = time.monotonic()
        while not stop.wait(RETRY_SECONDS):
            try:
                if self._try() != self._identity:
                    return False
                renewed = time.monotonic()
            except (ApiError, Unreachable) as error:
                log.warning("renewing lease %s: %s", self._name, error)
            if time.monotonic() - renewed > RENEW_DEADLINE:
                return False
        self._release()
        return True

    def _try(self) -> str:
        """Take or renew the Lease; returns who holds it."""
        lease = self._kube.find(LEASES, self._namespace, self._name)
        if lease is None:
            try:
                self._kube.create(LEASES, self._namespace, self._claim(None))
            except Conflict:
                return "another"
            return self._identity
        spec = lease["spec"]
        holder = str(spec.get("holderIdentity") or "")
        state = (holder, str(spec.get("renewTime")))
        if state != self._seen:
            self._seen, self._seen_at = state, time.monotonic()
        expired = time.monotonic() - self._seen_at > LEASE_SECONDS
        if holder and holder != self._identity and not expired:
            return holder
        try:
            self._kube.replace(LEASES, self._namespace, self._claim(lease))
        except Conflict:
            return holder or "another"
        return self._identity

    def _claim(self, lease: Object | None) -> Object:
        now = micro_timestamp(datetime.now(UTC))
        before = lease["spec"] if lease else {}
        ours = before.get("holderIdentity") == self._identity
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": lease["metadata"] if lease else {"name": self._name},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": LEASE_SECONDS,
                "acquireTime": before.get("acquireTime", now) if ours else now,
                "renewTime": now,
                "leaseTransitions": int(before.get("leaseTransitions") or 0)
                + (0 if ours or not lease else 1),
            },
        }

    def _release(self) -> None:
        try:
            lease = self._kube.find(LEASES, self._namespace, self._name)
            if lease and lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                self._kube.replace(LEASES, self._namespace, lease)
        except (ApiError, Unreachable) as error:
            log.warning(
                "lease %s is not released, others take it after %d s: %s", self._name, LEASE_SECONDS, error
            )
