"""Options of a vLLM server that judges drafts, for `vllm.LLM(**options)` or `vllm serve`.

python -m parse_infer.vllm_plugin.options TARGET ADAPTER      # prints the command
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from parse_infer.errors import ModelError
from parse_infer.files import first_sentence
from parse_infer.judge.adapter import ValidityConfig, check_target, read_head
from parse_infer.judge.adapter_files import read_adapter
from parse_infer.models.fingerprint import describe_config
from parse_infer.models.loading import load_config, load_served_model, weights_folder
from parse_infer.models.names import resolve
from parse_infer.speculation.rejected_draft import TOKENS
from parse_infer.vllm_plugin.compatibility import ARCHITECTURES
from parse_infer.vllm_plugin.probe_ids import ProbeIds
from parse_infer.vllm_plugin.reference import Reference, measure

MAX_DRAFT = 4096  # tokens; with token doubt, each needs an id beyond the vocabulary
SETTINGS = "parse"  # key of the plugin's settings in the model's configuration
PLUGIN = "parse"  # name of the entry point
VARIABLES = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""Required environment variables of a server with the plugin, which does not support vLLM's default on GPUs."""
PORT = 8001  # of the printed command; `parse-infer serve` uses 8000
REJECTED_DRAFTS = {
    "method": "custom_class",
    "model": "parse_infer.vllm_plugin.rejected_drafts.RejectedDrafts",
    "num_speculative_tokens": TOKENS,
}
"""`speculative_config` for vLLM: a rejected draft proposes the target's next tokens."""


def engine_options(
    target: str | Path, adapter: str | Path, *, max_draft: int = MAX_DRAFT, reference: Reference | None = None
) -> dict[str, Any]:
    """Options of a vLLM engine that runs `target` with the plugin; the caller may add others.

    The dtype is the checkpoint's, as in the local backend; vLLM's default would round float32. `speculative_config`
    proposes tokens from rejected drafts; the caller may drop or replace it.

    Args:
        target: a folder, Hugging Face id, embedded model ("zoo:target") or GGUF file.
        adapter: the target's validity adapter.
        max_draft: tokens of the longest draft.
        reference: validities for the server's self-check, from an earlier call; None: load the target once and
            measure them.

    Raises:
        FileNotFoundError: target or adapter, or one of their files, does not exist.
        ValueError: target and adapter do not fit, or the plugin has no class for the target's architecture.
    """
    folder, config = weights_folder(target), load_config(target)
    config._name_or_path = str(target)
    architecture = next(iter(config.architectures or ["none"]))
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{str(target)!r} has the architecture {architecture}, but the PARSE plugin for vLLM supports only "
            f"{', '.join(sorted(ARCHITECTURES))}: use the local backend"
        )
    files = read_adapter(resolve(adapter))
    judge = ValidityConfig.from_dict(files.validity_config)
    if judge.logprobs is not None:
        raise ModelError(
            f"the adapter {str(adapter)!r} judges by log-probabilities and needs no plugin: start any vLLM server, "
            "and give its address as --target-url"
        )
    check_target(str(adapter), judge.target, describe_config(config, architecture))
    read_head(str(adapter), judge, files.head)
    end_ids = end_tokens_of(target)
    ids = ProbeIds.of(judge, end_ids)
    n_ids = ids.size(min(max_draft, getattr(config, "max_position_embeddings", max_draft)))
    settings = {
        "adapter": str(files.folder),
        "vocab_size": config.vocab_size,
        "end_ids": end_ids,
        "reference": asdict(reference or measure(target, adapter)),
        "fingerprint": files.fingerprint,
    }
    options = {
        "model": str(folder),
        "served_model_name": [str(folder), judge_name(files.fingerprint)],
        "dtype": str(config.dtype or torch.float32).removeprefix("torch."),
        "enable_prefix_caching": True,
        "max_logprobs": max(20, ids.log_probabilities),  # 20 is vLLM's default
        "speculative_config": dict(REJECTED_DRAFTS),
        "hf_overrides": {
            "architectures": [ARCHITECTURES[architecture]],
            "vocab_size": config.vocab_size + n_ids,
            SETTINGS: settings,
        },
    }
    # CPU attention's smallest block size (default 128): K probes share only whole blocks.
    return options if torch.cuda.is_available() else options | {"block_size": 32}


def judge_name(fingerprint: str) -> str:
    """Second served model name of a server with this adapter.

    Validity requests use this name, so a server with another adapter rejects them, even right after a replacement.
    """
    return f"parse-adapter-{fingerprint}"


def end_tokens_of(target: str | Path) -> list[int]:
    """All end tokens of the target, ascending: `LanguageModel.eos_ids` without loading the weights."""
    return sorted(load_served_model(target).eos_ids)


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


def main(names: Sequence[str]) -> int:
    if len(names) != 2:
        print("usage: python -m parse_infer.vllm_plugin.options TARGET ADAPTER", file=sys.stderr)
        return 2
    try:
        options = engine_options(*names)
    except (OSError, ValueError) as error:
        print(f"error: {first_sentence(error)}", file=sys.stderr)
        return 2
    variables = [f"{name}={value}" for name, value in VARIABLES.items()]
    server = ["python", "-m", "vllm.entrypoints.openai.api_server"]
    print(shlex.join(["env", *variables, *server, *arguments(options | {"port": PORT})]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
