"""Configuration checks of a server with the plugin, before it loads any weights."""

from __future__ import annotations

from typing import Any

from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform

from parse_infer.errors import ModelError
from parse_infer.judge.adapter import ValidityConfig, check_target, read_head
from parse_infer.judge.adapter_files import read_adapter
from parse_infer.models.fingerprint import describe_config
from parse_infer.vllm_plugin.compatibility import ARCHITECTURES
from parse_infer.vllm_plugin.options import SETTINGS
from parse_infer.vllm_plugin.probe_ids import ProbeIds

_KEYS = ("adapter", "vocab_size", "end_ids", "reference", "fingerprint")


class ConfigChecks:
    """Hook that vLLM calls with the engine's configuration, by the model's architecture."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        pass

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Raise ValueError or FileNotFoundError for a configuration that the plugin does not support exactly."""
        config = vllm_config.model_config.hf_config
        settings = getattr(config, SETTINGS, None)
        if not isinstance(settings, dict) or any(key not in settings for key in _KEYS):
            raise ModelError(
                f"the model's configuration lacks {SETTINGS!r} with {', '.join(_KEYS)}: start the server with the "
                "options that parse_infer.vllm_plugin.options.engine_options gives"
            )
        parallel = vllm_config.parallel_config
        for what, size in (
            ("pipeline", parallel.pipeline_parallel_size),
            ("decode context", parallel.decode_context_parallel_size),
        ):
            if size > 1:
                raise ModelError(
                    f"{what} parallelism of {size} is not supported by the PARSE plugin: set it to 1, and use several "
                    "servers (data parallelism) for more requests"
                )
        unsupported = {
            "vLLM's own LoRA (enable_lora)": vllm_config.lora_config,
            "prompt embeddings (enable_prompt_embeds)": vllm_config.model_config.enable_prompt_embeds,
            "a KV transfer (kv_transfer_config)": vllm_config.kv_transfer_config,
            "micro-batches (enable_dbo)": parallel.enable_dbo,
            "model runner V2 (set VLLM_USE_V2_MODEL_RUNNER=0)": vllm_config.use_v2_model_runner,
        }
        for what, used in unsupported.items():
            if used:
                raise ModelError(f"{what} cannot be used together with the PARSE plugin")
        judge = _check_adapter(settings, config)
        wanted = ProbeIds.of(judge, settings["end_ids"]).log_probabilities
        allowed = vllm_config.model_config.max_logprobs
        if 0 <= allowed < wanted:
            raise ModelError(f"max_logprobs is {allowed}: set it to {wanted}, which a draft with many cuts may need")
        window = getattr(config, "sliding_window", None)
        if judge.token_rank and window and window < vllm_config.model_config.max_model_len:
            raise ModelError(
                f"the target has a sliding window of {window} tokens, and token doubt may need earlier tokens: "
                f"set max_model_len to at most {window}"
            )
        if current_platform.is_cuda_alike():
            # A full CUDA graph would skip the Python code of a step with probes.
            mode = vllm_config.compilation_config.cudagraph_mode
            if mode is None or mode.has_full_cudagraphs():
                vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE


def _check_adapter(settings: dict[str, Any], config: Any) -> ValidityConfig:
    name = settings["adapter"]
    files = read_adapter(name)
    if files.fingerprint != settings["fingerprint"]:
        raise ModelError(
            f"the adapter {name} has changed since this server's command was printed: its fingerprint is "
            f"{files.fingerprint} and not {settings['fingerprint']}; print the command again"
        )
    judge = ValidityConfig.from_dict(files.validity_config)
    found = describe_config(config, next(iter(ARCHITECTURES))) | {"vocab_size": settings["vocab_size"]}
    check_target(name, judge.target, found)
    read_head(name, judge, files.head)
    return judge
