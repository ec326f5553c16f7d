"""The operator's endpoints: Prometheus metrics, health, readiness. Figures are read when asked for."""

import math
import threading
from collections import Counter as Tally
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from operators.kube import Object, parse_time


class Metrics:
    """What is counted while it happens."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.reconciles = Counter(
            "dflash_operator_reconciles",
            "Looks at a Drafter, by outcome",
            ["outcome"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "dflash_operator_reconcile_seconds", "Time of one look", registry=self.registry
        )


class Figures:
    """What is read when it is asked for: a Prometheus collector over the operator's own state."""

    def __init__(
        self,
        *,
        drafters: Callable[[], Iterable[Object]],
        queue_length: Callable[[], int],
        requests: Callable[[], dict[str, int]],
        actions: Callable[[], dict[str, int]],
        status_writes: Callable[[], int],
        watch_silence: Callable[[], dict[str, float]],
        relists: Callable[[], dict[str, int]],
    ) -> None:
        self._drafters, self._queue_length, self._requests = drafters, queue_length, requests
        self._actions, self._status_writes = actions, status_writes
        self._watch_silence, self._relists = watch_silence, relists

    def collect(self) -> Iterable[Metric]:
        """All families."""
        items = list(self._drafters())
        phases = Tally(i.get("status", {}).get("phase") or "New" for i in items)
        yield _gauge("dflash_drafters", "Drafters, by phase", "phase", phases)
        yield from _of_each(items)
        queue = GaugeMetricFamily("dflash_operator_queue_length", "Drafters that are due to be looked at")
        queue.add_metric([], self._queue_length())
        yield queue
        silence = self._watch_silence()
        yield _gauge(
            "dflash_operator_watch_silence_seconds", "Since the API server last spoke", "kind", silence
        )
        yield _counter("dflash_operator_relists", "Times that a kind was listed", "kind", self._relists())
        yield _counter("dflash_operator_requests", "Requests to the API server", "verb", self._requests())
        yield _counter("dflash_operator_actions", "Planned actions carried out", "action", self._actions())
        writes = CounterMetricFamily("dflash_operator_status_writes", "Writes of a Drafter's status")
        writes.add_metric([], self._status_writes())
        yield writes


def _of_each(items: list[Object]) -> Iterable[Metric]:
    done = GaugeMetricFamily(
        "dflash_drafter_progress_ratio",
        "Share of the running stage that is done",
        labels=["drafter", "stage"],
    )
    length = GaugeMetricFamily(
        "dflash_drafter_acceptance_length", "Measured acceptance length", labels=["drafter"]
    )
    gpu = CounterMetricFamily(
        "dflash_drafter_gpu_seconds", "GPU time, lost attempts included", labels=["drafter", "stage"]
    )
    wasted = CounterMetricFamily(
        "dflash_drafter_wasted_gpu_seconds",
        "GPU time from a failure until the stage was further than before",
        labels=["drafter", "stage"],
    )
    figures = GaugeMetricFamily(
        "dflash_drafter_figure",
        "What the running stage says of itself: loss, rates, queue depth, shares of waiting",
        labels=["drafter", "stage", "name"],
    )
    alerts = GaugeMetricFamily(
        "dflash_drafter_alerts", "What is wrong with the running stage now", labels=["drafter"]
    )
    bottleneck = GaugeMetricFamily(
        "dflash_drafter_bottleneck", "1 for the side that limits training", labels=["drafter", "side"]
    )
    for item in items:
        name, status = item["metadata"]["name"], item.get("status", {})
        progress = status.get("progress", {})
        if progress.get("total"):
            done.add_metric([name, status["stage"]], progress["done"] / progress["total"])
        if status.get("acceptanceLength"):
            length.add_metric([name], float(status["acceptanceLength"]))
        for stage in status.get("stages", []):
            gpu.add_metric([name, stage["name"]], stage.get("gpuSeconds", 0))
            wasted.add_metric([name, stage["name"]], stage.get("wastedGpuSeconds", 0))
        for figure, text in progress.get("figures", {}).items():
            value = _number(text)
            if value is not None:
                figures.add_metric([name, status["stage"], figure], value)
        if progress:
            alerts.add_metric([name], len(status.get("alerts", [])))
        side = progress.get("figures", {}).get("bottleneck")
        if side:
            bottleneck.add_metric([name, side], 1)
    return (done, length, gpu, wasted, figures, alerts, bottleneck, *_of_money(items))


def _of_money(items: list[Object]) -> Iterable[Metric]:
    hours = GaugeMetricFamily(
        "dflash_drafter_gpu_hours",
        "GPU-hours spent, wasted, and projected to the end",
        labels=["drafter", "kind"],
    )
    cost = GaugeMetricFamily(
        "dflash_drafter_cost",
        "The same in money, where a price is given",
        labels=["drafter", "kind"],
    )
    end = GaugeMetricFamily(
        "dflash_drafter_projected_end_timestamp_seconds",
        "When the end is expected, and of which stage",
        labels=["drafter", "through"],
    )
    for item in items:
        name, told = item["metadata"]["name"], item.get("status", {}).get("cost", {})
        for kind in ("spent", "wasted", "projected"):
            if told.get(f"{kind}GpuHours"):
                hours.add_metric([name, kind], float(told[f"{kind}GpuHours"]))
            if told.get(kind):
                cost.add_metric([name, kind], float(told[kind]))
        if told.get("endsAt"):
            end.add_metric([name, told.get("through", "")], parse_time(told["endsAt"]))
    return hours, cost, end


def _number(text: str) -> float | None:
    """A figure's value; None for one that is a sentence, or not finite."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _gauge(name: str, text: str, label: str, values: dict[str, float] | Tally[str]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in dict(values).items():
        family.add_metric([key], value)
    return family


def serve(
    address: str, port: int, *, metrics: Metrics, healthy: Callable[[], str], ready: Callable[[], str]
) -> ThreadingHTTPServer:
    """Serve /metrics, /healthz and /readyz in a thread. `healthy` and `ready` return '' or why not."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, generate_latest(metrics.registry), CONTENT_TYPE_LATEST)
            elif self.path in ("/healthz", "/readyz"):
                why = healthy() if self.path == "/healthz" else ready()
                self._answer(503 if why else 200, (why or "ok").encode(), "text/plain; charset=utf-8")
            else:
                self._answer(404, b"/metrics, /healthz or /readyz", "text/plain")

        def _answer(self, code: int, body: bytes, kind: str) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Probes come every few seconds and are not worth a line."""

    server = ThreadingHTTPServer((address, port), Handler)
    threading.Thread(target=server.serve_forever, name="endpoints", daemon=True).start()
    return server
