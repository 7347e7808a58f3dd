"""The optional parts of the installation and how to install them; pyproject.toml lists what each contains."""

from __future__ import annotations

# The smallest extra that brings each module which the base installation does not have.
EXTRAS = {
    "matplotlib": "bench",
    "PIL": "bench",
    "reasoning_gym": "bench",
    "scipy": "bench",
    "datasets": "data",
    "trl": "data",
    "yaml": "data",
    "openai": "openai",
    "accelerate": "train",
    "peft": "train",
    "sklearn": "train",
    "tokenizers": "train",
    "wandb": "train",
    "lm_eval": "eval",
    "gguf": "gguf",
    "aiohttp": "coordinator",
    "fastapi": "serve",
    "prometheus_client": "serve",
    "pydantic": "serve",
    "pydantic_core": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "opentelemetry": "otel",
    "vllm": "vllm",
}


def install(extra: str) -> str:
    """How to install an optional part. No package index has this project, so the command needs a checkout."""
    return f'in a checkout of this repository, pip install -c constraints.txt ".[{extra}]"'


def missing_package(error: ModuleNotFoundError) -> str:
    """One sentence that names the missing package and how to install it."""
    module = (error.name or str(error)).partition(".")[0]
    extra = EXTRAS.get(module)
    return f"the package {module} is missing: {install(extra) if extra else f'pip install {module}'}"
