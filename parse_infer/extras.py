"""The optional parts of the installation: `pip install "parse-engine[bench]"` and so on, see pyproject.toml."""

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


def missing_package(error: ModuleNotFoundError) -> str:
    """One sentence: what is missing, and how to get it."""
    module = (error.name or str(error)).partition(".")[0]
    extra = EXTRAS.get(module)
    wanted = f'"parse-engine[{extra}]"' if extra else module
    return f"the package {module} is missing: pip install {wanted}"
