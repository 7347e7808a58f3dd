"""Start-up self-check: a server with other validities than the local backend does not start.

A complete engine judges the reference draft through its own scheduler, cache and graphs, before it takes requests.
The first run has an empty cache; the second run reuses its blocks.
"""

from __future__ import annotations

import time
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest, core

from parse_infer.errors import ServerError
from parse_infer.judge.adapter import ValidityConfig
from parse_infer.judge.adapter_files import read_adapter
from parse_infer.vllm_plugin.compatibility import ARCHITECTURES
from parse_infer.vllm_plugin.options import SETTINGS
from parse_infer.vllm_plugin.reference import Reference
from parse_infer.vllm_plugin.validity_requests import LogProbabilities, TrainedQuestions, ValidityRequest, validity_of

LIMITS = {"float32": 1e-3}
"""Largest allowed difference of a logit, by dtype; other dtypes: LIMIT."""
LIMIT = 0.3


def install() -> None:
    """Check every engine with a judge at the end of its `__init__`, where vLLM has no hook.

    A patch of the method that sizes the cache captures the engine; a patch of the last function call runs the check.
    """
    size_cache, finish = core.EngineCore._initialize_kv_caches, core.enable_envs_cache
    starting: list[Any] = []

    def sized(engine: Any, vllm_config: Any) -> Any:
        starting.append(engine)
        return size_cache(engine, vllm_config)

    def finished() -> None:
        while starting:
            check(starting.pop())
        finish()

    core.EngineCore._initialize_kv_caches = sized
    core.enable_envs_cache = finished


def check(engine: Any) -> None:
    """Raise ValueError if the judge of a `vllm.v1.engine.core.EngineCore` differs from its reference."""
    model = engine.vllm_config.model_config
    if not set(model.architectures) & set(ARCHITECTURES.values()):
        return
    settings = getattr(model.hf_config, SETTINGS)
    reference = Reference(**settings["reference"])
    config = ValidityConfig.from_dict(read_adapter(settings["adapter"]).validity_config)
    questions = TrainedQuestions.of(config, settings["end_ids"])
    asked = questions.about(reference.context_ids, reference.draft_ids, reference.cuts)
    if max(map(len, asked.prompts)) >= model.max_model_len:
        raise ServerError(
            f"max_model_len is {model.max_model_len}: too short for the draft of the plugin's self-check"
        )
    limit = LIMITS.get(str(model.dtype).removeprefix("torch."), LIMIT)
    for cache in ("an empty cache", "a cache that has the draft"):
        found = [validity_of(logit) for logit in asked.logits(_ask(engine, asked))]
        difference = reference.difference(found)
        if not difference <= limit:
            raise ServerError(
                f"this server judges drafts differently from the local backend, so it does not start: with {cache} "
                f"the logit differs by {difference:.2g}, and the limit for {model.dtype} is {limit:g}"
            )


def _ask(engine: Any, asked: ValidityRequest) -> list[LogProbabilities]:
    found: dict[str, LogProbabilities] = {}
    names = [f"parse-self-check-{i}" for i in range(len(asked.prompts))]
    for name, prompt in zip(names, asked.prompts, strict=True):
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=1, temperature=0, logprobs=asked.top, detokenize=False),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        engine.add_request(*engine.preprocess_add_request(request))
    while engine.scheduler.has_requests() or engine.batch_queue:
        outputs, executed = engine.step_fn()
        engine.post_step(executed)
        for output in (one for group in (outputs or {}).values() for one in group.outputs):
            if output.new_logprobs is not None:
                ids, values = output.new_logprobs.logprob_token_ids[0], output.new_logprobs.logprobs[0]
                found[output.request_id] = dict(zip(ids.tolist(), values.tolist(), strict=True))
    return [found[name] for name in names]
