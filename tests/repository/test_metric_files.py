"""Rules, dashboard and page of the metrics name existing metrics. promtool accepts the files, and each alert fires
for its condition.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.stack.stack import ROOT, missing
from toolcrew.contract.metrics import METRICS

PROMETHEUS = ROOT / "deploy" / "prometheus"
_NAME = re.compile(r"\btoolcrew_[a-z_]+")
_SUFFIX = re.compile(r"_(bucket|sum|count)$")


def promtool(*arguments: str | Path, text: bytes | None = None) -> str:
    """Run promtool and return its output. Fails if promtool finds an error."""
    ran = subprocess.run([ROOT / "scripts" / "promtool", *arguments], input=text, capture_output=True, check=False)
    output = (ran.stdout + ran.stderr).decode()
    if ran.returncode == 69:
        missing(output)
    assert ran.returncode == 0, output
    return output


def expressions_of_dashboard() -> list[str]:
    panels = json.loads((ROOT / "deploy" / "grafana" / "toolcrew.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def expressions_of_rules() -> list[str]:
    groups = yaml.safe_load((PROMETHEUS / "toolcrew.rules.yml").read_text())["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def metrics_of(expression: str) -> set[str]:
    """Return the metrics named in the text, each in the form that its kind allows."""
    names = set()
    for name in _NAME.findall(re.sub(r'"[^"]*"', '""', expression)):
        metric = METRICS.get(name) or METRICS.get(_SUFFIX.sub("", name))
        assert metric is not None, f"there is no {name}: {expression}"
        assert (metric.kind == "histogram") == (name != metric.name), expression
        names.add(metric.name)
    return names


def labels_of(expression: str) -> set[str]:
    selectors = re.findall(r"toolcrew_[a-z_]+\{([^}]*)\}", expression)
    return {label for selector in selectors for label in re.findall(r"([a-z_]+)\s*[=!]", selector)}


@pytest.mark.parametrize("expression", [*expressions_of_dashboard(), *expressions_of_rules()])
def test_expression_uses_existing_metrics_and_labels(expression: str) -> None:
    names = metrics_of(expression)
    assert names
    assert labels_of(expression) <= {label for name in names for label in METRICS[name].labels}


def test_the_dashboard_shows_every_metric() -> None:
    dashboard_metrics = {name for expression in expressions_of_dashboard() for name in metrics_of(expression)}
    assert METRICS.keys() - dashboard_metrics == set()


def test_every_expression_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    plain = [expression.replace("$__rate_interval", "5m") for expression in expressions_of_dashboard()]
    rules = [{"record": f"dashboard:{number}", "expr": expression} for number, expression in enumerate(plain)]
    (tmp_path / "dashboard.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "dashboard.yml")


def test_promtool_accepts_the_rules_and_the_example_config() -> None:
    promtool("check", "rules", PROMETHEUS / "toolcrew.rules.yml")
    promtool("check", "config", "--syntax-only", PROMETHEUS / "prometheus.yml")


def test_alerts_fire_only_for_their_conditions() -> None:
    promtool("test", "rules", PROMETHEUS / "toolcrew.tests.yml")
    tested = (PROMETHEUS / "toolcrew.tests.yml").read_text()
    rules = yaml.safe_load((PROMETHEUS / "toolcrew.rules.yml").read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules if f'"{rule["alert"]}"' not in tested] == []
    assert all(rule["annotations"].keys() == {"summary", "description"} for rule in rules)
