"""Entry point of the group `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

from __future__ import annotations

from typing import Any

from parse_infer.vllm_plugin.compatibility import ARCHITECTURES, is_known


def register() -> None:
    """Register the models with a judge. Other models are not affected."""
    import vllm
    from vllm import ModelRegistry

    for name in ARCHITECTURES.values():
        ModelRegistry.register_model(name, f"parse_infer.vllm_plugin.models:{name}")
    if is_known(vllm.__version__):  # else `models` raises ValueError when vLLM imports it
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from parse_infer.vllm_plugin import config_checks, self_check

        hook: Any = config_checks.ConfigChecks
        MODELS_CONFIG_MAP.update(dict.fromkeys(ARCHITECTURES.values(), hook))
        self_check.install()
