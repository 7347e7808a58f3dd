"""The command that starts a target's server."""

from __future__ import annotations

import inspect
import shlex

import pytest

from parse_infer.backends.launch import environment
from parse_infer.cli.commands.serve import serve
from parse_infer.vllm_plugin import options
from parse_infer.vllm_plugin.reference import Reference


@pytest.fixture
def words(monkeypatch, capsys) -> list[str]:
    """Of the printed command."""
    monkeypatch.setattr(options, "measure", lambda *_: Reference([1], [2], [1], [0.5]))
    assert options.main(["zoo:target", "zoo:adapter"]) == 0
    return shlex.split(capsys.readouterr().out)


def test_the_printed_command_sets_what_the_plugin_needs(words, monkeypatch):
    for name in options.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    at = words.index("python")
    assert words[0] == "env" and dict(word.split("=") for word in words[1:at]) == options.VARIABLES
    started_here = environment("target", {"hf_overrides": {options.SETTINGS: {}}})
    assert options.VARIABLES.items() <= started_here.items(), "a server that is started for you has others"


def test_the_printed_command_has_a_port_of_its_own(words):
    port = int(words[words.index("--port") + 1])
    assert port != inspect.signature(serve).parameters["port"].default, "where parse-infer serve listens"
