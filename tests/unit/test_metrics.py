"""The metrics of a namespace: their table, their document, the alert rules and the dashboard."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from redrb.cli import __main__ as cli
from redrb.watch.metrics.metric import (
    AGE,
    DEAD_S,
    FRESH_S,
    METRICS,
    MOST_WORKERS,
    UP,
    StateCollector,
)
from redrb.watch.state.model import State
from redrb.watch.state.observer import View
from tests.sample_state import sample_state
from tests.tools import need

ROOT = Path(__file__).parents[2]
RESOURCES = files("redrb.watch.metrics")
ALWAYS = {name: frozenset({"namespace"}) for name, _ in (UP, AGE)}
LABELS = ALWAYS | {metric.name: frozenset({"namespace", *metric.labels}) for metric in METRICS}
"""The labels of each metric."""


def scraped(view: View) -> str:
    registry = CollectorRegistry()
    registry.register(StateCollector(lambda: view, "default"))
    return generate_latest(registry).decode()


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def value(text: str, name: str, **labels: str) -> float | None:
    found = [
        figure
        for each, its, figure in samples(text)
        if each == name and its == {"namespace": "default", **labels}
    ]
    assert len(found) < 2
    return found[0] if found else None


def test_a_state_becomes_metrics() -> None:
    text = scraped(View(sample_state(), 1, 0.5))
    assert value(text, "redrb_up") == 1
    assert value(text, "redrb_state_age_seconds") == 0.5
    group = {"task": "math", "group": "default"}
    assert value(text, "redrb_groups_put_total", **group) == 12_345
    assert value(text, "redrb_groups_waiting", **group, status="aborted") == 6
    assert value(text, "redrb_staleness_max_versions", **group, place="leased") == 2
    assert value(text, "redrb_taken_staleness_versions_bucket", **group, le="1.0") == 9_000
    assert value(text, "redrb_taken_staleness_versions_count", **group) == 11_808
    assert value(text, "redrb_taken_staleness_versions_sum", **group) == 13_232
    dead = {"task": "math", "role": "maker", "worker": "gpu-04-2001"}
    assert value(text, "redrb_worker_up", **dead) == 0
    assert value(text, "redrb_worker_groups_total", **dead) is None
    assert value(text, "redrb_workers", task="math", role="maker", life="dead") == 1
    assert value(text, "redrb_worker_behind_versions", **dead | {"worker": "gpu-03-1312"}) == 11
    trainer = {"task": "math", "role": "trainer", "worker": "trainer-0"}
    assert value(text, "redrb_worker_steps_total", **trainer) == 368
    assert value(text, "redrb_worker_step_seconds_total", **trainer) == 6_900
    assert value(text, "redrb_staleness_bound_versions", task="code") is None
    assert value(text, "redrb_findings", severity="warning", code="dead-worker") == 1
    for name, labels, _ in samples(text):
        metric = re.sub(r"_(bucket|count|sum)$", "", name)
        assert set(labels) - {"le"} == LABELS[metric if metric in LABELS else name]


@pytest.mark.parametrize("state", [None, sample_state()])
def test_old_figures_are_not_served(state: State | None) -> None:
    age_s = FRESH_S + 0.1
    served = {name: figure for name, _, figure in samples(scraped(View(state, 1, age_s, "away")))}
    assert served == {"redrb_up": 0, "redrb_state_age_seconds": age_s}


def test_workers_are_bounded_and_dead_ones_leave() -> None:
    state = sample_state()
    maker = state.tasks[1].workers[0]
    many = [replace(maker, name=f"m{number}", seen_s=number / 1000) for number in range(300)]
    gone = replace(maker, name="gone", life="dead", seen_s=DEAD_S + 1)
    ended = replace(maker, name="ended", life="ended", seen_s=0.0)
    tasks = tuple(replace(task, workers=(gone, ended, *many)) for task in state.tasks)
    text = scraped(View(replace(state, tasks=tasks), 1, 0.0))
    names = [its["worker"] for name, its, _ in samples(text) if name == "redrb_worker_up"]
    assert len(names) == MOST_WORKERS
    assert "m0" in names
    assert not {"gone", "ended", "m299"} & set(names)
    assert value(text, "redrb_workers", task="math", role="maker", life="live") == 300


def test_a_name_cannot_add_lines() -> None:
    state = sample_state()
    maker = replace(state.tasks[1].workers[0], name='x"} 1\nredrb_up 7\\')
    task = replace(state.tasks[1], workers=(maker,))
    text = scraped(View(replace(state, tasks=(task,)), 1, 0.0))
    names = {its["worker"] for name, its, _ in samples(text) if name == "redrb_worker_up"}
    assert names == {maker.name}
    assert value(text, "redrb_up") == 1


def test_the_document_has_the_table_of_metrics() -> None:
    rows = [
        f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.help} |"
        for metric in METRICS
    ]
    rows = [f"| `{name}` | gauge |  | {text} |" for name, text in (UP, AGE)] + rows
    document = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    section = document.partition("## Metrics of a namespace")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("| `")] == rows


def test_names_have_units() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"redrb_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not re.search(r"_(ms|seconds_age|mb|kb|percent)\b", metric.name)
        assert metric.help.endswith(".")


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(RESOURCES.joinpath("alerts.yml").read_text())["groups"]
    return list(group["rules"])


def board_expressions() -> list[str]:
    board = json.loads(RESOURCES.joinpath("grafana.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    targets = [target for panel in panels for target in panel["targets"]]
    assert {target["datasource"]["uid"] for target in targets} == {"${datasource}"}
    variables = board["templating"]["list"]
    assert [each["name"] for each in variables] == ["datasource", "namespace", "task"]
    queries = [each["definition"] for each in variables if each["type"] == "query"]
    legends = [
        f"{target['expr']} by ({', '.join(re.findall(r'{{(.*?)}}', target['legendFormat']))})"
        for target in targets
    ]
    return [*queries, *legends]


def known(name: str) -> frozenset[str]:
    base = name.removesuffix("_bucket")
    assert base in LABELS, f"there is no metric {name}"
    return LABELS[base] | ({"le"} if base != name else set())


def check_expression(text: str) -> None:
    """Check that every metric exists, and has the labels that select it or that it is shown by."""
    names = re.findall(r"\bredrb_\w+", text)
    assert names
    for name, selector in re.findall(r"\b(redrb_\w+)\{(.*?)\}", text):
        assert set(re.findall(r"(\w+)\s*(?:=|!=)~?\"", selector)) <= known(name), text
    every = set[str]().union(*map(known, names))
    for listed in re.findall(r"\b(?:by|on|label_values)\s*\(([\w, ]+)\)", text):
        labels = {each.strip() for each in listed.split(",")} - {""}
        assert labels - set(names) <= every, text


def test_alerts_and_dashboard_use_known_metrics() -> None:
    for rule in rules():
        check_expression(rule["expr"])
        assert set(rule["annotations"]) == {"summary", "action"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        labels = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        assert labels <= set[str]().union(*map(known, re.findall(r"redrb_\w+", rule["expr"])))
    for expression in board_expressions():
        check_expression(expression)


def test_the_document_names_each_alert() -> None:
    document = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    section = document.partition("## Alerts")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert named == [rule["alert"] for rule in rules()]


def fires(alert: str, at: str, *series: str, **labels: str) -> dict[str, Any]:
    """Return a case of promtool: these series let an alert fire after this time."""
    rule = next(rule for rule in rules() if rule["alert"] == alert)
    return {
        "interval": "1m",
        "input_series": [
            {"series": text.rpartition("} ")[0] + "}", "values": text.rpartition("} ")[2]}
            for text in series
        ],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})',
                "eval_time": at,
                "exp_samples": [{"labels": "{}", "value": 1}],
            }
        ],
        "name": f"{alert} {rule['expr']}",
    }


def quiet(alert: str, at: str, *series: str) -> dict[str, Any]:
    """Return a case of promtool: these series let the alert not fire."""
    case = fires(alert, at, *series)
    case["promql_expr_test"][0]["exp_samples"] = []
    return case


GROUP = 'namespace="n",task="t",group="g"'
MAKER = 'namespace="n",task="t",role="maker",worker="w"'


def behind(versions: int) -> str:
    """Return the series of a maker that is behind."""
    return f"redrb_worker_behind_versions{{{MAKER}}} {versions}x9"


CASES = [
    fires("RedrbDown", "2m", 'redrb_up{namespace="n"} 0x9'),
    fires("RedrbExporterMissing", "6m", 'up{job="other"} 1x9'),
    fires(
        "RedrbTrainerStarving",
        "11m",
        f"redrb_takes_waiting{{{GROUP}}} 1x19",
        f"redrb_groups_acked_total{{{GROUP}}} 5x19",
    ),
    quiet(
        "RedrbTrainerStarving",
        "11m",
        f"redrb_takes_waiting{{{GROUP}}} 1x19",
        f"redrb_groups_acked_total{{{GROUP}}} 5+1x19",
    ),
    fires(
        "RedrbTaskStarving",
        "16m",
        f"redrb_consumers{{{GROUP}}} 1x29",
        f"redrb_groups_put_total{{{GROUP}}} 5x29",
        f'redrb_groups_waiting{{{GROUP},status="completed"}} 0x29',
    ),
    fires(
        "RedrbNobodyTakes",
        "16m",
        f"redrb_consumers{{{GROUP}}} 0x29",
        f"redrb_groups_put_total{{{GROUP}}} 5+1x29",
        f'redrb_groups_waiting{{{GROUP},status="completed"}} 5+1x29',
    ),
    fires(
        "RedrbLeaseStuck",
        "35m",
        f"redrb_groups_leased{{{GROUP}}} 8x40",
        f"redrb_groups_acked_total{{{GROUP}}} 5x40",
        f"redrb_groups_returned_total{{{GROUP}}} 5x40",
    ),
    fires(
        "RedrbStalenessAboveBound",
        "6m",
        f'redrb_staleness_max_versions{{{GROUP},place="waiting"}} 5x9',
        'redrb_staleness_bound_versions{namespace="n",task="t"} 4x9',
        'redrb_staleness_bound_versions{namespace="n",task="t",instance="second"} 4x9',
    ),
    fires(
        "RedrbMakerBehind",
        "7m",
        behind(5),
        'redrb_staleness_bound_versions{namespace="n",task="t"} 4x9',
    ),
    fires("RedrbMakerBehind", "7m", behind(11)),
    quiet(
        "RedrbMakerBehind",
        "7m",
        behind(11),
        'redrb_staleness_bound_versions{namespace="n",task="t"} 20x9',
    ),
    fires("RedrbDeadLettersGrow", "4m", f"redrb_groups_dead{{{GROUP}}} 0 0 1 2 3 4"),
    quiet("RedrbDeadLettersGrow", "4m", f"redrb_groups_dead{{{GROUP}}} 9 9 5 5 5 5"),
    fires(
        "RedrbMemoryNearLimit",
        "3m",
        'redrb_server_memory_used_bytes{namespace="n",server="s"} 90x9',
        'redrb_server_memory_limit_bytes{namespace="n",server="s"} 100x9',
    ),
    fires("RedrbServerEvictsKeys", "2m", 'redrb_server_evicts_keys{namespace="n",server="s"} 1x9'),
    fires("RedrbSaveFailed", "2m", 'redrb_server_last_save_ok{namespace="n",server="s"} 0x9'),
    fires("RedrbWorkerDead", "2m", f"redrb_worker_up{{{MAKER}}} 0x9"),
    fires("RedrbLedgerUnbalanced", "6m", f"redrb_ledger_balanced{{{GROUP}}} 0x9"),
]


def check_by_promtool(folder: Path, tests: dict[str, Any]) -> None:
    """Run tests of rules by Prometheus' own tool."""
    (folder / "tests.yml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        [need("promtool"), "test", "rules", "tests.yml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires(tmp_path: Path) -> None:
    """Each alert fires on the trouble that it names, by Prometheus' own tool."""
    assert {case["name"].split()[0] for case in CASES} == {rule["alert"] for rule in rules()}
    (tmp_path / "alerts.yml").write_text(RESOURCES.joinpath("alerts.yml").read_text())
    cases = [{key: part for key, part in case.items() if key != "name"} for case in CASES]
    tests = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": cases}
    check_by_promtool(tmp_path, tests)


def test_each_curve_of_the_dashboard_has_series(tmp_path: Path) -> None:
    """Prometheus' own tool evaluates each expression over the metrics of a state."""
    board = json.loads(RESOURCES.joinpath("grafana.json").read_text())
    expressions = [
        target["expr"]
        .replace("$namespace", "default")
        .replace("$task", "math|code")
        .replace("$__rate_interval", "5m")
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]
    assert len(expressions) > 30
    series = []
    for name, its, figure in samples(scraped(View(sample_state(), 1, 0.5))):
        labels = ",".join(f"{label}={json.dumps(text)}" for label, text in its.items())
        series.append({"series": f"{name}{{{labels}}}", "values": f"{figure}x20"})
    case = {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [
            {
                "expr": f"count({expression}) > bool 0",
                "eval_time": "15m",
                "exp_samples": [{"labels": "{}", "value": 1}],
            }
            for expression in expressions
        ],
    }
    check_by_promtool(tmp_path, {"tests": [case]})


def test_metrics_follow_the_rules_of_prometheus() -> None:
    done = subprocess.run(
        [need("promtool"), "check", "metrics"],
        input=scraped(View(sample_state(), 1, 0.5)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("flag", "name"), [("--print-alerts", "alerts.yml"), ("--print-dashboard", "grafana.json")]
)
def test_the_command_prints_alerts_and_dashboard(
    flag: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["exporter", flag]) == 0
    assert capsys.readouterr().out == RESOURCES.joinpath(name).read_text()
