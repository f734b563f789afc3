"""The alerts and the dashboard speak of metrics and labels that there are.

What the alerts do is tested by ``promtool test rules`` (``make monitoring``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from learner.page import LABELS, VERSION, gauge_name
from learner.ppo.diagnostics import METRICS
from learner.serving.metrics import ServeMetrics
from streams.lag import exporter
from streams.metrics import ALL, COHORT_ALARMS, ProcessorMetrics

FOLDER = Path(__file__).parents[2] / "docker" / "monitoring"
GENERAL_LABELS = {"instance", "job", "le", "state"}


def known() -> dict[str, set[str]]:
    """Each metric with its labels."""
    found = {metric.name: set(metric.labels) for metric in ALL}
    for name in (exporter.LAG, exporter.CURRENT, exporter.LAG_SECONDS, exporter.EVENT_TIME_LAG):
        found[name] = set(exporter.GROUP_LABELS)
    found[exporter.STATE] = {*exporter.GROUP_LABELS, "state"}
    found[exporter.END] = set(exporter.TOPIC_LABELS)
    found[exporter.UP] = set()
    registry = CollectorRegistry()
    ServeMetrics(registry)
    for family in registry.collect():
        labels = {"outcome", "kind"}
        found[family.name] = labels
    for name in (VERSION, *map(gauge_name, METRICS)):
        found[name] = set(LABELS)
    gateway = (FOLDER.parents[1] / "streams/gateway/app.py").read_text(encoding="utf-8")
    for name in re.findall(r'"(clawstream_gateway_\w+)"', gateway):
        found[name] = {"end", "kind"}
    return found


KNOWN = known()


def alerts() -> list[tuple[str, str]]:
    text = (FOLDER / "alerts.yaml").read_text(encoding="utf-8")
    groups = yaml.safe_load(text)["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


def panels() -> list[tuple[str, str]]:
    board = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
    return [
        (f"{panel['title']} {target['refId']}", target["expr"])
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]


def plain(name: str) -> str:
    return re.sub(r"_(total|created|bucket|sum|count)$", "", name)


def named_labels(expr: str) -> Iterator[str]:
    for clause in re.findall(r"\b(?:by|without|on)\s*\(([^)]*)\)", expr):
        yield from (label.strip() for label in clause.split(","))
    for selector in re.findall(r"\{([^}]*)\}", expr):
        yield from re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)


@pytest.mark.parametrize(("title", "expr"), [*alerts(), *panels()])
def test_every_expression_asks_for_what_there_is(title: str, expr: str) -> None:
    names = {plain(name) for name in re.findall(r"\b(?:clawstream|kafka)_\w+", expr)}
    assert names
    assert names <= KNOWN.keys()
    labels = GENERAL_LABELS.union(*(KNOWN[name] for name in names))
    assert set(named_labels(expr)) <= labels


def test_a_counter_says_when_it_began_and_the_alerts_see_its_first_event() -> None:
    metrics = ProcessorMetrics("reward")
    metrics.add(COHORT_ALARMS, policy="default")
    labels = {"processor": "reward", "policy": "default"}
    assert metrics.registry.get_sample_value("clawstream_cohort_alarms_created", labels)
    for title, expr in alerts():
        for name in re.findall(r"increase\((\w+)_total", expr):
            assert f"time() - {name}_created <" in expr, title


def test_each_alert_has_a_test_and_says_what_to_do() -> None:
    tested = (FOLDER / "alerts.test.yaml").read_text(encoding="utf-8")
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in (rule for group in rules for rule in group["rules"]):
        assert set(rule["annotations"]) == {"summary", "description", "action"}
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert f"alertname: {rule['alert']}" in tested
