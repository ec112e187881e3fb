from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from headrace.core.timeline import Timeline
from headrace.observe.histogram import Histogram
from headrace.observe.metrics import ServingMetrics, render_metrics


def samples(metrics: ServingMetrics) -> dict[str, float]:
    """{name with its labels but the common two: value}, read back by Prometheus's own parser."""
    text, content_type = render_metrics(metrics, 'a "model"')
    assert content_type.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == ('a "model"', "0")
            found[sample.name + "".join(f" {k}={v}" for k, v in labels.items())] = sample.value
    return found


def test_histogram_buckets_include_their_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe_all([0.5, 1.0, 1.5, 2.0, 9.0])
    assert histogram.cumulative() == [("1", 2.0), ("2", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 14.0


def test_fresh_metrics_render() -> None:
    found = samples(ServingMetrics())
    assert found["vllm:num_requests_running"] == found["vllm:kv_cache_usage_perc"] == 0
    assert found["vllm:generation_tokens_total"] == 0 and found["vllm:engine_up"] == 0


def test_latencies_come_from_the_timeline() -> None:
    metrics = ServingMetrics()
    timeline = Timeline()
    for name, time in (("QUEUED", 100.0), ("RUNNING", 101.0), ("PREEMPTED", 102.5), ("RUNNING", 102.6)):
        timeline.stamp(name, time)
    timeline.token_times = [102.0, 102.2, 103.0]
    metrics.count_finish("length", 100.0, 7, 3, timeline)
    found = samples(metrics)
    assert abs(found["vllm:time_to_first_token_seconds_sum"] - 2.0) < 1e-9
    assert abs(found["vllm:e2e_request_latency_seconds_sum"] - 3.0) < 1e-9
    assert abs(found["vllm:request_queue_time_seconds_sum"] - 1.0) < 1e-9
    assert abs(found["vllm:request_prefill_time_seconds_sum"] - 1.0) < 1e-9
    assert abs(found["vllm:request_decode_time_seconds_sum"] - 1.0) < 1e-9
    assert found["vllm:inter_token_latency_seconds_count"] == 2
    assert abs(found["vllm:request_time_per_output_token_seconds_sum"] - 0.5) < 1e-9
    assert found["vllm:request_success_total finished_reason=length"] == 1
    assert found["vllm:request_prompt_tokens_sum"] == 7


def test_answers_without_tokens_have_no_latency() -> None:
    metrics = ServingMetrics()
    metrics.count_finish("abort", 100.0, 7, 0, Timeline())
    metrics.count_finish("abort", 100.0, 7, 0, None)
    found = samples(metrics)
    assert found["vllm:time_to_first_token_seconds_count"] == 0
    assert found["vllm:request_success_total finished_reason=abort"] == 2


def test_refusals_are_told_apart_by_their_code() -> None:
    metrics = ServingMetrics()
    assert samples(metrics)["vllm:request_refused_total code=queue_full"] == 0
    for code in ("queue_full", "queue_full", "no_token_allowed"):
        metrics.count_refusal(code)
    found = samples(metrics)
    assert found["vllm:request_refused_total code=queue_full"] == 2
    assert found["vllm:request_refused_total code=no_token_allowed"] == 1


def test_state_of_the_core() -> None:
    metrics = ServingMetrics()
    metrics.core_stats = {
        "num_running": 3, "num_waiting": 2, "num_held_blocks": 10, "num_kv_blocks": 40,
        "num_preemptions": 4, "prefix_query_tokens": 100, "prefix_hit_tokens": 60,
    }  # fmt: skip
    found = samples(metrics)
    assert found["vllm:num_requests_running"] == 3 and found["vllm:num_requests_waiting"] == 2
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert found["vllm:num_preemptions_total"] == 4
    assert found["vllm:prefix_cache_queries_total"] == 100 and found["vllm:prefix_cache_hits_total"] == 60


def test_memory_of_each_rank() -> None:
    metrics = ServingMetrics()
    metrics.core_stats = {"rank_memory_bytes": [5, 7], "startup_s": {"weights": 1.5}}
    found = samples(metrics)
    assert found["vllm:startup_seconds stage=weights"] == 1.5
    assert (found["vllm:rank_memory_bytes rank=0"], found["vllm:rank_memory_bytes rank=1"]) == (5, 7)
