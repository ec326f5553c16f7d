"""The Kubernetes API as this operator uses it: plain dicts over the official client's connection.

The official client gives configuration, credentials (refreshed in a pod) and TLS; everything above
that is here, in one module, so that another client would touch one file. Only the calls that the
operator makes exist: get, list, create, apply, merge-patch, delete, evict nothing, watch.
Watching is in `operators.informer`, the work in `operators.manager`.
"""

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import orjson
import urllib3
from kubernetes import client, config

Object = dict[str, Any]

FIELD_MANAGER = "dflash-operator"
_CONNECT_SECONDS, _READ_SECONDS = 5.0, 30.0
# The API server sends a bookmark about every minute: a longer silence means the connection is dead.
WATCH_SECONDS, WATCH_SILENCE_SECONDS = 300, 75.0
_PAGE = 500

log = logging.getLogger(__name__)


class ApiError(Exception):
    """The API server refused; `status` is HTTP's, `reason` Kubernetes' CamelCase word."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.message = status, reason, message


class NotFound(ApiError):  # noqa: N818 - named as the API names it
    """404: there is no such object (or no such kind)."""


class Conflict(ApiError):  # noqa: N818
    """409: the object has changed since it was read, or exists already."""


class Gone(ApiError):  # noqa: N818
    """410: the resource version is too old; list again."""


class Unreachable(Exception):  # noqa: N818
    """The API server cannot be reached, or the connection broke."""


_KINDS: dict[int, type[ApiError]] = {404: NotFound, 409: Conflict, 410: Gone}


@dataclass(frozen=True)
class Resource:
    """Where a kind lives in the API."""

    api: str
    plural: str

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """URL path of the collection, an object or a subresource in a namespace ('' for all or none)."""
        base = f"/api/{self.api}" if "/" not in self.api else f"/apis/{self.api}"
        scope = f"/namespaces/{namespace}" if namespace else ""
        return "/".join(part for part in (f"{base}{scope}/{self.plural}", name, subresource) if part)


DRAFTERS = Resource("dflash.dev/v1alpha1", "drafters")
JOBS = Resource("batch/v1", "jobs")
PODS = Resource("v1", "pods")
SERVICES = Resource("v1", "services")
CONFIG_MAPS = Resource("v1", "configmaps")
EVENTS = Resource("v1", "events")
NETWORK_POLICIES = Resource("networking.k8s.io/v1", "networkpolicies")
LEASES = Resource("coordination.k8s.io/v1", "leases")
DEFINITIONS = Resource("apiextensions.k8s.io/v1", "customresourcedefinitions")


class Kube:
    """A connection to one API server. Thread-safe."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self._pool: urllib3.PoolManager = api.rest_client.pool_manager
        self.requests: dict[str, int] = {}
        """Requests sent so far, by verb: for metrics."""

    @classmethod
    def connect(cls, connections: int = 16) -> Self:
        """From the pod's ServiceAccount, or, outside a cluster, from KUBECONFIG."""
        settings = client.Configuration()
        settings.connection_pool_maxsize = connections
        if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
            config.load_incluster_config(client_configuration=settings)
        else:
            # Named here, since the client reads the variable only once, when it is imported.
            config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=settings)
        return cls(client.ApiClient(settings))

    def cluster_id(self) -> str:
        """Tells this cluster from others: a hash of its CA, which every pod can see, or of its address."""
        settings = self._api.configuration
        authority = (
            Path(settings.ssl_ca_cert).read_bytes() if settings.ssl_ca_cert else settings.host.encode()
        )
        return hashlib.sha256(authority).hexdigest()[:12]

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """One object; `NotFound` where there is none."""
        return self._json("GET", resource.path(namespace, name))

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """One object, or None."""
        try:
            return self.get(resource, namespace, name)
        except NotFound:
            return None

    def list(self, resource: Resource, namespace: str, selector: str = "") -> tuple[list[Object], str]:
        """All objects by label selector, page by page, and the version to watch from."""
        items: list[Object] = []
        query = {"limit": str(_PAGE), "labelSelector": selector}
        while True:
            page = self._json("GET", resource.path(namespace), query)
            items += page["items"]
            token = page["metadata"].get("continue")
            if not token:
                return items, page["metadata"]["resourceVersion"]
            query["continue"] = token

    def create(self, resource: Resource, namespace: str, body: Object, dry_run: bool = False) -> Object:
        """Create; `Conflict` where the name is taken."""
        query = {"fieldManager": FIELD_MANAGER} | ({"dryRun": "All"} if dry_run else {})
        return self._json("POST", resource.path(namespace), query, body)

    def apply(self, resource: Resource, namespace: str, body: Object) -> Object:
        """Server-side apply as the operator's own field manager."""
        path = resource.path(namespace, body["metadata"]["name"])
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return self._json("PATCH", path, query, body, "application/apply-patch+yaml")

    def patch(
        self, resource: Resource, namespace: str, name: str, body: Object, subresource: str = ""
    ) -> Object:
        """Merge patch; with `metadata.resourceVersion` in the body refused when the object has moved."""
        path = resource.path(namespace, name, subresource)
        query = {"fieldManager": FIELD_MANAGER}
        return self._json("PATCH", path, query, body, "application/merge-patch+json")

    def replace(self, resource: Resource, namespace: str, body: Object) -> Object:
        """Update by compare-and-swap on the body's resource version."""
        return self._json("PUT", resource.path(namespace, body["metadata"]["name"]), None, body)

    def delete(self, resource: Resource, namespace: str, name: str, propagation: str = "Foreground") -> None:
        """Delete, dependents first; no error where there is nothing."""
        body = {"propagationPolicy": propagation}
        try:
            self._json("DELETE", resource.path(namespace, name), None, body)
        except NotFound:
            return

    def event(self, about: Object, kind: str, reason: str, message: str) -> None:
        """Tell of a transition, as shown by `kubectl describe`. `kind` is Normal or Warning."""
        now = datetime.now(UTC)
        metadata = about["metadata"]
        body = {
            "metadata": {
                "name": f"{metadata['name']}.{int(now.timestamp() * 1e6):x}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": kind,
            "reason": reason,
            "message": message[:1024],
            "source": {"component": FIELD_MANAGER},
            "firstTimestamp": timestamp(now),
            "lastTimestamp": timestamp(now),
            "count": 1,
        }
        self.create(EVENTS, metadata["namespace"], body)

    def published_schema(self, api: str, kind: str) -> Object:
        """A kind's OpenAPI schema, as the API server publishes it; `NotFound` without such an API."""
        schemas = self._json("GET", f"/openapi/v3/apis/{api}")["components"]["schemas"]
        for schema in schemas.values():
            if any(k["kind"] == kind for k in schema.get("x-kubernetes-group-version-kind", [])):
                return dict(schema)
        raise NotFound(404, "NotFound", f"the API {api} has no kind {kind}")

    def watch(self, resource: Resource, namespace: str, selector: str, version: str) -> Iterator[Object]:
        """Changes after a version: {type, object}, bookmarks too. Ends when the server ends it.

        `Gone` when the version is too old, whether told by HTTP status or within the stream;
        `Unreachable` when the connection breaks or is silent for longer than bookmarks allow.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
            "resourceVersion": version,
            "labelSelector": selector,
        }
        try:
            response = self._send(
                "GET",
                resource.path(namespace),
                query,
                None,
                "",
                read_seconds=WATCH_SILENCE_SECONDS,
                stream=True,
            )
            buffer = b""
            try:
                for chunk in response.stream(amt=65_536):
                    buffer += chunk
                    *lines, buffer = buffer.split(b"\n")
                    for line in lines:
                        if line.strip():
                            yield _change(orjson.loads(line))
            finally:
                response.close()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(f"watch of {resource.plural} broke: {error}") from error

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        try:
            response = self._send(method, path, query, body, content_type)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(f"{method} {path}: {error}") from error
        return dict(orjson.loads(response.data))

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Object | None,
        content_type: str,
        *,
        read_seconds: float = _READ_SECONDS,
        stream: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": "application/json", "User-Agent": FIELD_MANAGER}
        if body is not None:
            headers["Content-Type"] = content_type
        self._api.update_params_for_auth(headers, [], ["BearerToken"])
        given = {key: value for key, value in (query or {}).items() if value}
        url = self._api.configuration.host + path + (f"?{urlencode(given)}" if given else "")
        verb = "WATCH" if stream else method
        self.requests[verb] = self.requests.get(verb, 0) + 1
        response = self._pool.request(
            method,
            url,
            body=None if body is None else orjson.dumps(body),
            headers=headers,
            timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=read_seconds),
            preload_content=not stream,
            # A GET may be repeated on a connection that the server closed while it lay idle.
            retries=urllib3.Retry(1, redirect=0, status=0) if method == "GET" else False,
        )
        if response.status >= 300:
            raise _refusal(response.status, response.data)
        return response


def _change(entry: Object) -> Object:
    if entry["type"] == "ERROR":
        status = entry["object"]
        raise _refusal(int(status.get("code") or 500), orjson.dumps(status))
    return entry


def _refusal(status: int, data: bytes) -> ApiError:
    try:
        told = orjson.loads(data)
        reason, message = str(told.get("reason") or "Unknown"), str(told.get("message") or "")
    except (orjson.JSONDecodeError, AttributeError):
        reason, message = "Unknown", data[:500].decode(errors="replace")
    return _KINDS.get(status, ApiError)(status, reason, message)


def timestamp(when: datetime) -> str:
    """A time as Kubernetes writes it, to the second."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_timestamp(when: datetime) -> str:
    """A time as Leases have it, to the microsecond."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_time(text: str) -> float:
    """Unix time of a Kubernetes timestamp."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
