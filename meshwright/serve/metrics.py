"""What a service counts, in a registry of its own: two services in one process do not mix."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
REQUEST_S = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Prometheus metrics of one service. Times are in seconds.

    waiting, waiting_tokens  requests without a first token, and the tokens of their prompts
    running                  requests that have had one and are not finished
    kv_used                  share of the KV cache that is in use, 0 to 1 (what `engine.stats()` says)
    replicas                 of each copy of the model, where there are several: requests under way, its outstanding tokens
                             (prompts to compute, and the most that answers may still have), and kv_used
    first_token              from arrival to the first output of a request
    token                    of a request with n >= 2 tokens, the mean time of those after the first: (last - first) / (n - 1)
    request                  from arrival to the last output
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"meshwright_{name}", text, labels, registry=self.registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"meshwright_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"meshwright_{name}_seconds", text, buckets=buckets, registry=self.registry)

        self.waiting = gauge("requests_waiting", "Requests that have had no token yet")
        self.waiting_tokens = gauge("tokens_waiting", "Prompt tokens of the requests that wait")
        self.running = gauge("requests_running", "Requests that are being answered")
        self.kv_used = gauge("kv_cache_used_ratio", "Share of the KV cache in use")
        self.replicas = {
            "requests": gauge("replica_requests", "Requests that a copy of the model has under way", ("replica",)),
            "tokens": gauge("replica_outstanding_tokens", "Tokens that a copy may still have to compute", ("replica",)),
            "kv_used": gauge("replica_kv_cache_used_ratio", "Share of a copy's KV cache in use", ("replica",)),
        }
        self._figures: Mapping[str, float] = {}
        self.ready = gauge("ready", "1 while the engine steps and requests are taken")
        self.first_token = histogram("time_to_first_token", "From arrival to the first token", FIRST_TOKEN_S)
        self.token = histogram("time_per_output_token", "Mean time between tokens after the first, of a request", TOKEN_S)
        self.request = histogram("request", "From arrival to the last token", REQUEST_S)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that were taken")
        self.output_tokens = counter("output_tokens", "Tokens generated")
        self.finished = counter("requests_finished", "Requests that came to an end, by how", ("reason",))
        self.aborted = counter("requests_aborted", "Requests given up: the client left, or the server had to stop")
        self.refused = counter("requests_refused", "Requests not taken, by why", ("reason",))
        self.answers = counter("http_responses", "Answers by route and status", ("route", "status"))

    def text(self) -> bytes:
        """In Prometheus' text format."""
        for name, value in self._figures.items():
            if name == "kv_used":
                self.kv_used.set(value)
            elif name.startswith("replica."):
                _, number, figure = name.split(".")
                self.replicas[figure].labels(number).set(value)
        return generate_latest(self.registry)

    def take(self, stats: Mapping[str, float]) -> None:
        """What an engine says of itself after a step. Steps are many, and those who ask few."""
        self._figures = stats
