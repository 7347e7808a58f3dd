"""The version stands in one place, files that repeat it agree, and the platform's forms and workflow are valid."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from parse_infer import __version__

ROOT = Path(__file__).parents[1]
# Where files name the version of this package, besides parse_infer/__init__.py.
STATED = {
    "CITATION.cff": r"^version: (\S+)$",
    "CHANGELOG.md": r"^## (\d\S*) - \d{4}-\d\d-\d\d$",
    "CONTRIBUTING.md": r"git tag -a v(\S+) ",
    "deploy/compose.yaml": r"image: parse-\S+:([\d.]+)$",
    "deploy/kubernetes.yaml": r"image: parse-\S+:([\d.]+)$",
    "docs/guide/servers.md": r"--target \S+ -t parse-\w+:([\d.]+) ",
}
SCHEMAS = {
    "vendor.citation-file-format": "CITATION.cff",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/*.yml",
    "vendor.github-workflows": ".github/workflows/*.yml",
    "custom.github-workflows-require-timeout": ".github/workflows/*.yml",
}


@pytest.mark.parametrize("distribution", ["parse-engine", "parse-engine-zoo"])
def test_both_distributions_have_the_packages_version(distribution: str) -> None:
    assert version(distribution) == __version__


@pytest.mark.parametrize("name", STATED)
def test_files_that_state_the_version_agree(name: str) -> None:
    stated = re.findall(STATED[name], (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    newest = stated[:1] if name == "CHANGELOG.md" else stated
    assert stated and set(newest) == {__version__}, f"{name} states {stated}"


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_platforms_files_are_valid(schema: str) -> None:
    files = [str(path) for path in ROOT.glob(SCHEMAS[schema])]
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files]
    run = subprocess.run(command, capture_output=True, text=True)
    assert files and run.returncode == 0, run.stdout + run.stderr


def test_the_workflow_runs_what_ci_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
    assert "secrets." not in yaml.dump(workflow)


def test_the_bug_report_asks_for_what_a_repair_needs() -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug_report.yml").read_text(encoding="utf-8"))
    required = {field["id"] for field in form["body"] if field.get("validations", {}).get("required")}
    assert required == {"version", "machine", "command", "output"}
