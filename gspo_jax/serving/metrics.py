"""What Prometheus is told (docs/serving.md)."""

from collections.abc import Iterator

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from gspo_jax.serving.loop import Loop

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics:
  """Counters of one server, and what its loop says of itself whenever it is asked."""

  def __init__(self, loop: Loop):
    self.registry, self._loop = prometheus.CollectorRegistry(), loop
    self.requests = prometheus.Counter(
      "gspo_jax_requests", "HTTP requests.", ["path", "status"], registry=self.registry
    )
    self.seconds = prometheus.Histogram(
      "gspo_jax_request_seconds",
      "From a request for responses to its answer.",
      registry=self.registry,
      buckets=SECONDS,
    )
    self.finished = prometheus.Counter(
      "gspo_jax_responses", "Responses by how they ended.", ["reason"], registry=self.registry
    )
    self.reloads = prometheus.Counter(
      "gspo_jax_reloads", "Weights that were to be replaced.", ["outcome"], registry=self.registry
    )
    self.queued = prometheus.Gauge(
      "gspo_jax_responses_queued", "Responses that wait or are sampled.", registry=self.registry
    )
    self.registry.register(self)

  def text(self) -> bytes:
    return prometheus.generate_latest(self.registry)

  def collect(self) -> Iterator[prometheus.Metric]:
    usage = self._loop.total()
    for name, about, value in (
      ("gspo_jax_generated_tokens", "Tokens sampled.", usage.tokens),
      ("gspo_jax_prefilled_tokens", "Tokens of prefixes.", usage.prefilled),
      ("gspo_jax_decode_steps", "Decoding steps of all slots.", usage.steps),
      ("gspo_jax_slot_steps", "Decoding steps, over all slots.", usage.slot_steps),
      ("gspo_jax_prefill_seconds", "Seconds of prefilling.", usage.prefill_seconds),
      ("gspo_jax_decode_seconds", "Seconds of decoding.", usage.decode_seconds),
      ("gspo_jax_engine_failures", "Errors of the engine.", self._loop.failures),
    ):
      yield CounterMetricFamily(name, about, value=value)
    yield GaugeMetricFamily("gspo_jax_requests_running", "Prompts.", value=self._loop.running)
    yield GaugeMetricFamily("gspo_jax_paused", "1: nothing is sampled.", value=self._loop.paused)
    yield InfoMetricFamily(
      "gspo_jax_weights", "The weights in use.", value={"version": self._loop.label}
    )
