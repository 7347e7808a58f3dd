"""The examples of docs/guide/serving.md run, against tiny models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "guide" / "serving.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


@pytest.mark.slow
def test_the_example_of_curl(served):
    found = re.search(rf"curl {ADDRESS}(\S+) -H '([^']+)' -d '([^']+)'", PAGE)
    assert found and found[2] == "Content-Type: application/json"
    answer = served.post(found[1], json.loads(found[3])).json()
    assert answer["choices"][0]["parse"]["spans"]


def test_the_example_of_the_openai_client(served, capsys):
    (code,) = re.findall(r"^```py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert ADDRESS in code and "zoo:target" in code
    shorter = code.replace("stream=True,", "stream=True, max_tokens=32,")  # random models never end by themselves
    exec(compile(shorter.replace(ADDRESS, served.url).replace("zoo:target", "tiny"), "serving.md", "exec"), {})
    written = capsys.readouterr().out
    question = re.search(r'"content": "([^"]+)"', code)
    assert question
    own = served.engine.generate(question[1], block_tokens="whole", max_new_tokens=32)
    assert written.startswith(own.text) and f"{own.stats.target_forwards} " in written
