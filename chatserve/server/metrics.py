"""Prometheus series under vLLM's names, for what exists here.

Gauges and engine counters are read from the engine's last `EngineStats` snapshot; latency histograms are made in
this process, on the event loop only, so they take no locks and cost well under a microsecond per value. Labels are
never anything a client chooses; tenants' come bounded from their ledger. `chatserve.server.routes.operations` renders
them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from chatserve.engine.protocol import EngineStats
from chatserve.tenancy.usage import Usage

if TYPE_CHECKING:
    from chatserve.server.generation import Generation

TTFT_EDGES = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_EDGES = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_EDGES = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
SIZE_EDGES = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000,
)  # fmt: skip
CHOICES_EDGES = (1, 2, 5, 10, 20)
HTTP_EDGES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)

HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", TTFT_EDGES),
    "inter_token_latency_seconds": ("Between two tokens of one choice.", TOKEN_EDGES),
    "request_time_per_output_token_seconds": ("Mean time per token after the first, per request.", TOKEN_EDGES),
    "e2e_request_latency_seconds": ("From arrival to the end.", REQUEST_EDGES),
    "request_queue_time_seconds": ("From arrival to admission.", REQUEST_EDGES),
    "request_prefill_time_seconds": ("From admission to the first token.", REQUEST_EDGES),
    "request_decode_time_seconds": ("From the first token to the end.", REQUEST_EDGES),
    "request_inference_time_seconds": ("From admission to the end.", REQUEST_EDGES),
    "request_prompt_tokens": ("Prompt tokens per request.", SIZE_EDGES),
    "request_generation_tokens": ("Output tokens per request, all choices.", SIZE_EDGES),
    "request_params_n": ("Choices asked for.", CHOICES_EDGES),
    "request_params_max_tokens": ("max_tokens, where given.", SIZE_EDGES),
}
"""Name (without ``vllm:``) to help text and upper edges of the buckets."""

COUNTERS = {
    "vllm:num_preemptions": ("Sequences put back to the queue for want of memory.", "preemptions"),
    "vllm:prompt_tokens": ("Prompt tokens of admitted requests.", "prompt_tokens"),
    "vllm:prompt_tokens_cached": ("Prompt tokens whose KV was reused.", "prefix_hit_tokens"),
    "vllm:generation_tokens": ("Tokens sampled.", "generation_tokens"),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_query_tokens"),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    "chatserve:engine_steps": ("Engine steps run.", "steps"),
    "chatserve:cow_copies": ("Blocks copied on write.", "copies"),
    "chatserve:evictions": ("Cached blocks that left the device for want of memory.", "evictions"),
    "chatserve:demotions": ("Blocks copied to host memory instead of dropped.", "demotions"),
    "chatserve:promotions": ("Blocks copied back from host memory.", "promotions"),
    "chatserve:partial_block_hits": ("Prefix matches that ended inside a block.", "partial_hits"),
    "chatserve:aborts": ("Requests ended by their client.", "aborts"),
    "chatserve:computed_prompt_tokens": ("Prompt tokens run through the model.", "computed_prompt_tokens"),
    "chatserve:engine_busy_seconds": ("Time spent in engine steps.", "busy_seconds"),
}
"""Counter (without ``_total``) to help text and field of `EngineStats`."""


TENANT_COUNTERS = {
    "requests": (
        "Requests of a tenant, by how they ended.",
        "outcome",
        ("completed", "cancelled", "failed", "rejected"),
    ),
    "tokens": ("Tokens of a tenant.", "kind", ("prompt", "cached", "computed", "generated", "delivered")),
    "seconds": ("Time of a tenant's requests in the queue and running.", "phase", ("queue", "run")),
    "kv_block_seconds": ("KV blocks of a tenant times seconds.", "tier", ("device", "host")),
}
"""Counter (``chatserve:tenant_…``) to help text, label beside the tenant's, and its values."""


class Histogram:
    """Counts per bucket and the sum: a value costs one bisection."""

    __slots__ = ("_counts", "_edges", "_sum")

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = edges
        self._counts = [0] * (len(edges) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Add a value ``times`` times."""
        self._counts[bisect_left(self._edges, value)] += times
        self._sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts under their upper edges, as Prometheus wants them."""
        total = 0
        out: list[tuple[str, float]] = []
        for edge, count in zip([*map(str, map(float, self._edges)), "+Inf"], self._counts, strict=True):
            total += count
            out.append((edge, total))
        return out

    @property
    def sum(self) -> float:
        """Sum of all values."""
        return self._sum


class ServerMetrics:
    """All series of one server; the engine's counters stay monotone when the engine is restarted."""

    def __init__(self) -> None:
        self.rejections: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.http_requests: Counter[tuple[str, str, str]] = Counter()
        self.client_retries = 0
        self.answers_spliced = 0
        self.answers_unspliceable = 0
        self.http_seconds: dict[str, Histogram] = {}
        self.histograms = {name: Histogram(edges) for name, (_, edges) in HISTOGRAMS.items()}
        self.observe_token_gap = self.histograms["inter_token_latency_seconds"].observe
        self._last = EngineStats()
        self._restarts = 0
        self._before_restarts: Counter[str] = Counter()

    def observe_generation(self, generation: Generation, reason: str) -> None:
        """A generation ended for ``reason`` (``stop``, ``length``, ``abort``, ``error``)."""
        self.finished[reason] += 1
        times, usage, sampling = generation.timings, generation.usage, generation.request.sampling
        self._observe("request_prompt_tokens", usage.prompt_tokens)
        self._observe("request_generation_tokens", usage.completion_tokens)
        self._observe("request_params_n", sampling.n)
        if sampling.max_tokens is not None:
            self._observe("request_params_max_tokens", sampling.max_tokens)
        if times.started is None or times.finished is None:
            return
        self._observe("request_queue_time_seconds", times.started - times.arrived)
        if times.first_token is None:
            return
        self._observe("time_to_first_token_seconds", times.first_token - times.arrived)
        self._observe("request_prefill_time_seconds", times.first_token - times.started)
        if reason in ("stop", "length"):
            self._observe("e2e_request_latency_seconds", times.finished - times.arrived)
            self._observe("request_inference_time_seconds", times.finished - times.started)
            self._observe("request_decode_time_seconds", times.finished - times.first_token)
            if usage.completion_tokens > 1:
                spent = (times.finished - times.first_token) / (usage.completion_tokens - 1)
                self._observe("request_time_per_output_token_seconds", spent)

    def observe_http(self, handler: str, method: str, status: int, seconds: float, *, retry: bool = False) -> None:
        """One HTTP response ended; ``handler`` is a route's path, never a client's.

        Args:
            retry: the client said that it had sent the request before.
        """
        self.http_requests[handler, method, str(status)] += 1
        self.client_retries += retry
        if handler not in self.http_seconds:
            self.http_seconds[handler] = Histogram(HTTP_EDGES)
        self.http_seconds[handler].observe(seconds)

    def observe_engine(self, stats: EngineStats, restarts: int) -> None:
        """The newest counters of the engine that came after so many restarts; each counts from zero.

        To be called at its end too: nobody may have asked for the metrics for a while.
        """
        if restarts != self._restarts or stats.steps < self._last.steps:
            fields = {field for _, field in COUNTERS.values()}
            self._before_restarts.update({field: getattr(self._last, field) for field in fields})
        self._last, self._restarts = stats, restarts

    def render(
        self,
        stats: EngineStats,
        tenants: Mapping[str, Usage],
        *,
        restarts: int = 0,
        model_name: str,
        config_info: dict[str, str],
    ) -> bytes:
        """The text exposition of everything, with the engine's last snapshot and tenants' sums by label."""
        self.observe_engine(stats, restarts)
        registry = CollectorRegistry()
        registry.register(_Snapshot(self._families(self._counters(stats), stats, model_name, config_info)))
        registry.register(_Snapshot(_tenant_families(tenants)))
        return generate_latest(registry)

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)

    def _counters(self, stats: EngineStats) -> dict[str, float]:
        fields = [field for _, field in COUNTERS.values()]
        return {field: getattr(stats, field) + self._before_restarts[field] for field in fields}

    def _families(
        self, counters: dict[str, float], stats: EngineStats, model_name: str, config_info: dict[str, str]
    ) -> Iterator[Metric]:
        labels, values = ["model_name", "engine"], [model_name, "0"]

        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(name, text, labels=labels)
            family.add_metric(values, value)
            return family

        def counter(name: str, text: str, label: str, counts: dict[str, int]) -> Metric:
            family = CounterMetricFamily(name, text, labels=[*labels, label])
            for key, count in sorted(counts.items()):
                family.add_metric([*values, key], count)
            return family

        yield gauge("vllm:num_requests_running", "Sequences in the batch.", stats.num_running)
        yield gauge("vllm:num_requests_waiting", "Requests in the queue.", stats.num_waiting)
        held = stats.blocks_held / stats.blocks_total if stats.blocks_total else 0.0
        yield gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use by requests (0 to 1).", min(1.0, held))
        yield gauge("chatserve:kv_blocks_free", "KV blocks nobody uses.", stats.blocks_free)
        yield gauge("chatserve:kv_blocks_cached", "KV blocks that only the prefix cache keeps.", stats.blocks_cached)
        yield gauge("chatserve:kv_blocks_leaked", "KV blocks held though nothing runs; always 0.", stats.blocks_leaked)
        swapped = stats.host_blocks_total - stats.host_blocks_free
        share = swapped / stats.host_blocks_total if stats.host_blocks_total else 0.0
        yield gauge("vllm:cpu_cache_usage_perc", "Share of host KV blocks in use (0 to 1).", share)
        info = GaugeMetricFamily("vllm:cache_config_info", "Cache configuration.", labels=[*labels, *config_info])
        info.add_metric([*values, *config_info.values()], 1)
        yield info
        for name, (text, field) in COUNTERS.items():
            family = CounterMetricFamily(name, text, labels=labels)
            family.add_metric(values, counters[field])
            yield family
        yield counter("vllm:request_success", "Requests ended, by reason.", "finished_reason", self.finished)
        yield counter("vllm:admission_rejections", "Requests refused, by reason.", "reason", self.rejections)
        for name, histogram in self.histograms.items():
            timing = HistogramMetricFamily(f"vllm:{name}", HISTOGRAMS[name][0], labels=labels)
            timing.add_metric(values, histogram.buckets(), histogram.sum)
            yield timing
        requests = CounterMetricFamily("http_requests", "HTTP responses.", labels=["handler", "method", "status"])
        for key, count in sorted(self.http_requests.items()):
            requests.add_metric(key, count)
        yield requests
        for name, text, count in (
            ("client_retries", "Requests that clients sent again.", self.client_retries),
            ("answers_spliced", "Quoted answers whose exact ids went into a prompt.", self.answers_spliced),
            ("answers_unspliceable", "Quoted answers that the template drops or changes.", self.answers_unspliceable),
        ):
            family = CounterMetricFamily(f"chatserve:{name}", text, labels=labels)
            family.add_metric(values, count)
            yield family
        seconds = HistogramMetricFamily("http_request_duration_seconds", "To the response's end.", labels=["handler"])
        for handler, histogram in sorted(self.http_seconds.items()):
            seconds.add_metric([handler], histogram.buckets(), histogram.sum)
        yield seconds


def _tenant_families(tenants: Mapping[str, Usage]) -> Iterator[Metric]:
    for name, (text, label, values) in TENANT_COUNTERS.items():
        family = CounterMetricFamily(f"chatserve:tenant_{name}", text, labels=["tenant", label])
        for tenant, usage in sorted(tenants.items()):
            for value in values:
                family.add_metric([tenant, value], getattr(usage, _field(name, value)))
        yield family


def _field(counter: str, value: str) -> str:
    """The field of `Usage` behind one series."""
    return {
        "requests": f"requests_{value}",
        "tokens": f"{value}_tokens",
        "seconds": f"{value}_seconds",
        "kv_block_seconds": f"{value}_block_seconds",
    }[counter]


class _Snapshot(Collector):
    """Hands one scrape's families to the exposition."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
