"""The entry point of the group `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

from __future__ import annotations

from typing import Any

from parse_infer.vllm_plugin.compatibility import ARCHITECTURES, is_known


def register() -> None:
    """Make the models with a judge known. Whoever does not ask for one of them notices nothing."""
    import vllm
    from vllm import ModelRegistry

    for name in ARCHITECTURES.values():
        ModelRegistry.register_model(name, f"parse_infer.vllm_plugin.models:{name}")
    if is_known(vllm.__version__):  # else the models say so when they are asked for
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from parse_infer.vllm_plugin import config_checks, self_check

        hook: Any = config_checks.Refusals
        MODELS_CONFIG_MAP.update(dict.fromkeys(ARCHITECTURES.values(), hook))
        self_check.install()
