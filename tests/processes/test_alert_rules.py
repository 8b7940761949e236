"""The alert rules, evaluated by promtool: each fires for its cause alone, and none for a healthy job."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
import yaml
from prometheus_server import CONFIGS, needs_prometheus

pytestmark = needs_prometheus

RULES = CONFIGS / "prometheus_rules.yml"
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"] if "alert" in rule]
STEPS = 720  # of 15 s: three hours

#: The series of a healthy job of eight GPUs, as text of promtool: value, change per step, number of steps.
HEALTHY = {
    'up{job="efficientllm"}': f"1+0x{STEPS}",
    'efficientllm_run_info{user="alice",account="nlp",partition="gpu",hosts="n1,n2",job_id="7",model="llama"}': (
        f"1+0x{STEPS}"
    ),
    "efficientllm_fresh": f"1+0x{STEPS}",
    "efficientllm_stalled": f"0+0x{STEPS}",
    "efficientllm_report_age_seconds": f"4+0x{STEPS}",
    "efficientllm_elapsed_seconds": f"60+15x{STEPS}",
    "efficientllm_ranks_expected": f"8+0x{STEPS}",
    "efficientllm_ranks_reporting": f"8+0x{STEPS}",
    "efficientllm_gpus_measured": f"8+0x{STEPS}",
    "efficientllm_gpus_unused": f"0+0x{STEPS}",
    'efficientllm_pcu_ratio{over="window"}': f"0.9+0x{STEPS}",
    'efficientllm_goodput_ratio{over="job"}': f"0.95+0x{STEPS}",
    'efficientllm_straggler_named_ranks{over="window"}': f"0+0x{STEPS}",
    'efficientllm_health_throttled_ratio{over="window"}': f"0.01+0x{STEPS}",
    "efficientllm_losses_not_finite_total": f"0+0x{STEPS}",
    "efficientllm_tokens_total": f"1000+600000x{STEPS}",
    "efficientllm_energy_measured_joules_total": f"100+60000x{STEPS}",
    **{
        f'efficientllm_events_total{{kind="{kind}"}}': f"0+0x{STEPS}"
        for kind in ("xid", "ecc", "rejected", "aggregator", "stalled", "straggler")
    },
}
LABELS = '{run_id="mine",instance="alice.mine.1"}'


def steps(minutes, before, value, after=None):
    """Return values that change after 60 minutes, and change again after further minutes."""
    rest = STEPS - 240 - 4 * minutes
    return f"{before}+0x239 {value}+0x{4 * minutes - 1} {before if after is None else after}+0x{rest}"


def labelled(name):
    return name.replace("{", f"{LABELS[:-1]},") if "{" in name else f"{name}{LABELS}"


def promtool(folder, series, **tests):
    """Fail if promtool finds other values or alerts than the expected ones."""
    given = [{"series": labelled(name), "values": values} for name, values in series.items()]
    test = {"interval": "15s", "input_series": given, **tests}
    path = folder / "test.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def evaluate(folder, series, expected, texts=()):
    """Fail if other alerts fire than the expected ones: {minutes: {name: severity}}."""
    tests = []
    for minutes, alerts in expected.items():
        labels = [f'{{alertname="{name}",severity="{severity}"}}' for name, severity in alerts.items()]
        samples = [{"labels": one, "value": 1} for one in labels]
        firing = 'count by (alertname, severity) (ALERTS{alertstate="firing"})'
        tests.append({"expr": firing, "eval_time": f"{minutes}m", "exp_samples": samples})
    promtool(folder, series, promql_expr_test=tests, alert_rule_test=[{"eval_time": "77m", **text} for text in texts])


def ending(series):
    """Return the series with values that are stale after 60 minutes."""
    return {name: f"{values.split('x')[0]}x239 stale" for name, values in series.items()}


#: Changes of the series of a healthy job without a problem, and the minutes at which no alert fires.
SILENT = {
    "healthy": ({}, [1, 10, 59, 150]),
    # The job removes its target file, so Prometheus marks all series as stale, `up` too.
    "normal end": (ending(HEALTHY), [60, 61, 65, 80, 150]),
    "evaluation of 25 minutes": (
        {
            **ending({name: HEALTHY[name] for name in HEALTHY if re.search("over=|ranks_rep|gpus_measured", name)}),
            "efficientllm_report_age_seconds": "4+0x239 19+15x99 4+0x300",
            "efficientllm_fresh": steps(25, 1, 0),
        },
        [61, 70, 84, 89],
    ),
    "long start-up in the first hour": ({'efficientllm_goodput_ratio{over="job"}': f"0.3+0x{STEPS}"}, [20, 40, 59]),
    "end of a static target": ({'up{job="efficientllm-static"}': steps(100, 1, 0)}, [75]),
}


@pytest.mark.parametrize("name", SILENT)
def test_job_without_a_problem_has_no_alert(tmp_path, name):
    changes, minutes = SILENT[name]

    evaluate(tmp_path, {**HEALTHY, **changes}, {at: {} for at in minutes})


#: Name -> (severity, series that differ from those of a healthy job from minute 60 on, minutes until the alert).
CAUSES = {
    "TrainingStalled": ("critical", {"efficientllm_stalled": (0, 1)}, 2),
    "JobDisappeared": ("critical", {'up{job="efficientllm"}': (1, 0)}, 2),
    "GpuError": ("critical", {'efficientllm_events_total{kind="xid"}': (0, 1)}, 0),
    "LossNotFinite": ("critical", {"efficientllm_losses_not_finite_total": (0, 3)}, 0),
    "NoReports": ("warning", {"efficientllm_fresh": (1, 0)}, 30),
    "RanksMissing": ("warning", {"efficientllm_ranks_reporting": (8, 7)}, 5),
    "GpusIdle": ("warning", {'efficientllm_pcu_ratio{over="window"}': (0.9, 0.19)}, 15),
    "GpusUnused": ("warning", {"efficientllm_gpus_unused": (0, 2)}, 15),
    "GoodputLow": ("warning", {'efficientllm_goodput_ratio{over="job"}': (0.95, 0.69)}, 15),
    "Straggler": ("warning", {'efficientllm_straggler_named_ranks{over="window"}': (0, 1)}, 10),
    "ClocksSlowedDown": ("warning", {'efficientllm_health_throttled_ratio{over="window"}': (0.01, 0.2)}, 10),
    "AggregatorReplaced": ("warning", {'efficientllm_events_total{kind="aggregator"}': (0, 1)}, 0),
    "PeersRejected": ("warning", {'efficientllm_events_total{kind="rejected"}': (0, 50)}, 0),
}


@pytest.mark.parametrize("name", CAUSES)
def test_alert_fires_for_its_cause_alone_and_not_before_its_time(tmp_path, name):
    severity, changes, wait = CAUSES[name]
    series = {**HEALTHY, **{one: steps(100, before, value) for one, (before, value) in changes.items()}}

    evaluate(tmp_path, series, {60 + wait + 2: {name: severity}, 60 + wait - 1 if wait else 59: {}})


def test_every_alert_has_a_section_of_the_operators_page():
    page = (CONFIGS.parent / "docs" / "operators.md").read_text()

    for rule in ALERTS:
        name, texts = rule["alert"], rule["annotations"]
        assert texts["runbook_url"] == f"{{{{ with $labels.runbook_url }}}}{{{{ . }}}}#{name.lower()}{{{{ end }}}}"
        assert re.fullmatch(r"1\. .*\. 2\. .*\.", texts["steps"])
        (section,) = re.findall(rf"^### {name}\n\n(.*)", page, re.MULTILINE)
        assert section.lower().startswith(rule["labels"]["severity"])


def test_every_alert_is_tested_here():
    others = {"NoFirstReport", "PageUnreachable"}

    assert {rule["alert"] for rule in ALERTS} == CAUSES.keys() | others


def test_job_without_any_window_has_an_alert_after_an_hour(tmp_path):
    first = {name: values for name, values in HEALTHY.items() if re.match("up|efficientllm_(stalled|run_info)", name)}
    series = {**first, "efficientllm_fresh": f"0+0x{STEPS}"}

    evaluate(tmp_path, series, {59: {}, 61: {"NoFirstReport": "warning"}})


def test_page_that_was_never_read_has_an_alert_after_15_minutes(tmp_path):
    series = {'up{job="efficientllm"}': f"0+0x{STEPS}"}

    evaluate(tmp_path, series, {14: {}, 16: {"PageUnreachable": "warning"}})


def test_alert_of_a_dead_job_becomes_an_unreachable_page(tmp_path):
    series = {**ending(HEALTHY), 'up{job="efficientllm"}': steps(100, 1, 0)}

    evaluate(tmp_path, series, {70: {"JobDisappeared": "critical"}, 95: {"PageUnreachable": "warning"}})


def test_power_cap_of_busy_gpus_has_no_alert(tmp_path):
    """Time at the power limit is not in `throttled_ratio`, and no rule reads the power."""
    assert not re.search("watts|power", "".join(rule["expr"] for rule in ALERTS))


@pytest.mark.parametrize("runbook", ["", "https://wiki.example.org/effllm"])
def test_alert_names_the_job_its_user_and_its_hosts_and_the_value(tmp_path, runbook):
    series = {**HEALTHY, "efficientllm_gpus_unused": steps(100, 0, 2)}
    (info,) = (name for name in series if name.startswith("efficientllm_run_info"))
    series[info.replace("}", f',runbook_url="{runbook}"}}')] = series.pop(info)
    (rule,) = (rule for rule in ALERTS if rule["alert"] == "GpusUnused")
    link = {"runbook_url": runbook} if runbook else {}
    alert = {
        "exp_labels": {
            "severity": "warning", "run_id": "mine", "instance": "alice.mine.1", "user": "alice", "account": "nlp",
            "partition": "gpu", "hosts": "n1,n2", "job_id": "7", **link,
        },
        "exp_annotations": {
            "summary": "mine of alice on n1,n2: 2 allocated GPUs are used by no rank",
            "steps": rule["annotations"]["steps"],
            "runbook_url": f"{runbook}#gpusunused" if runbook else "",
        },
    }  # fmt: skip
    text = {"alertname": "GpusUnused", "exp_alerts": [alert]}

    evaluate(tmp_path, series, {77: {"GpusUnused": "warning"}}, [text])


def test_tokens_per_second_are_right_from_the_first_minute(tmp_path):
    """600,000 tokens in 15 s are 40,000 tokens/s; `rate` over five minutes is a fifth of it after one minute."""
    values = {"round(efficientllm:tokens_per_second, 1e-3)": 40_000, "round(efficientllm:joules_per_token, 1e-4)": 0.1}
    tests = [
        {"expr": query, "eval_time": f"{minutes}m", "exp_samples": [{"labels": LABELS, "value": value}]}
        for minutes in (1, 2, 4, 60)
        for query, value in values.items()
    ]

    promtool(tmp_path, HEALTHY, promql_expr_test=tests)
