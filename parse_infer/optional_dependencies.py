"""Optional dependencies by module, and how to install them; pyproject.toml defines the extras."""

from __future__ import annotations

# The smallest extra that installs each optional module.
EXTRAS = {
    "matplotlib": "bench",
    "PIL": "bench",
    "reasoning_gym": "bench",
    "scipy": "bench",
    "datasets": "data",
    "fsspec": "data",
    "math_verify": "data",
    "pyarrow": "data",
    "trl": "data",
    "yaml": "data",
    "accelerate": "train",
    "peft": "train",
    "sklearn": "train",
    "wandb": "train",
    "lm_eval": "eval",
    "gguf": "gguf",
    "aiohttp": "vllm-client",
    "fastapi": "serve",
    "prometheus_client": "serve",
    "pydantic": "serve",
    "pydantic_core": "vllm-client",
    "starlette": "serve",
    "uvicorn": "serve",
    "opentelemetry": "otel",
    "vllm": "vllm",
}


def install(extra: str) -> str:
    """Return the commands that install an extra. They need a checkout, since no package index has this project."""
    command = f'pip install -c constraints.txt ".[{extra}]"'
    if extra == "vllm":  # with other versions of the same packages
        command = (
            'python -m venv .venv-vllm && .venv-vllm/bin/pip install -c constraints-vllm.txt ".[vllm]" && '
            "export PARSE_VLLM_PYTHON=$PWD/.venv-vllm/bin/python"
        )
    return f"in a checkout of this repository, {command}"


def missing_package(error: ModuleNotFoundError) -> str:
    """Return one sentence that names the missing package and how to install it."""
    module = (error.name or str(error)).partition(".")[0]
    extra = EXTRAS.get(module)
    return f"the package {module} is missing: {install(extra) if extra else f'pip install {module}'}"
