"""The Grafana dashboard asks for what the server tells."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from parse_infer.serve.app import create_app
from parse_infer.serve.thread_runner import ThreadRunner

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana.json"
ENDINGS = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}


def test_every_panel_queries_existing_metrics(make_engine):
    families = create_app(ThreadRunner(make_engine())).state.metrics.registry.collect()
    exported = {family.name + ending for family in families for ending in ENDINGS[family.type]}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queried = {name for query in queries for name in re.findall(r"\bparse_\w+", query)}
    assert len(queried) > 12 and queried <= exported, queried - exported
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_histograms_name_their_unit(make_engine):
    """https://prometheus.io/docs/practices/naming: base units, and ratios from 0 to 1."""
    families = create_app(ThreadRunner(make_engine())).state.metrics.registry.collect()
    histograms = [family for family in families if family.type == "histogram"]
    assert histograms and {family.name.rpartition("_")[2] for family in histograms} == {"seconds", "ratio"}
    for family in histograms:
        bounds = {float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels} - {math.inf}
        assert not family.name.endswith("_ratio") or max(bounds) == 1
