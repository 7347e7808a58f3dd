"""The Grafana dashboard asks for what the server tells."""

from __future__ import annotations

import json
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
