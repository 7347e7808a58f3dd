"""Resolve names and addresses to the parts of a `ServerBackend`; start a server for each model without address."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parse_infer.backends.launch.supervisor import READY_S, Supervisor
from parse_infer.backends.launch.vllm_process import CACHED_READS, draft_server, launch, plain_options, stock_options
from parse_infer.backends.pool.client import Client
from parse_infer.backends.pool.identity import Identity
from parse_infer.backends.pool.replicas import PATIENCE_S, ReplicaPool
from parse_infer.backends.servers.api_keys import DRAFT_HINT, DRAFT_VARIABLE, TARGET_VARIABLE, draft_key, find_key
from parse_infer.backends.servers.in_process_draft import InProcessDraft
from parse_infer.backends.servers.logprob_reads import LogprobReads
from parse_infer.backends.servers.target import Target
from parse_infer.backends.servers.zero_shot_requests import ZeroShotRequests
from parse_infer.calibration.schema import Calibration, resolve_risk, shipped_calibration
from parse_infer.errors import SettingsError
from parse_infer.judge.adapter import ValidityConfig, check_target, read_head
from parse_infer.judge.adapter_files import AdapterFiles, read_adapter
from parse_infer.judge.logprob_head import LogprobHead
from parse_infer.judge.min_p import MinPJudge, check_one_judge, token_scorer
from parse_infer.models.fingerprint import describe_config
from parse_infer.models.loading import (
    LanguageModel,
    load_config,
    load_language_model,
    load_served_model,
    weights_folder,
)
from parse_infer.models.names import resolve
from parse_infer.models.train_problems import train_problems_of
from parse_infer.settings.generation import GenerationSettings
from parse_infer.text.cuts import CutPolicy
from parse_infer.text.tokenizer_spec import TokenizerSpec

Urls = str | Sequence[str]
_SMALL = 32 * 2**20  # bytes of weights; reading more per token costs more than a server's overhead


@dataclass(frozen=True)
class Parts:
    """The parts of a `ServerBackend`.

    Attributes:
        draft: the draft model's replicas or in-process model, and its tokenizer; without one its servers get text.
        models: names of the models.
        train_problems: hashes of the training prompts of judge and models, see `leave_out_learnt`.
        calibration: source of the risk promises.
        threshold: the judge's calibrated threshold, if it has one.
        processes: the started servers, if any.
    """

    target: Target
    draft: tuple[ReplicaPool | InProcessDraft, TokenizerSpec | None] | None
    models: dict[str, Any]
    train_problems: frozenset[str]
    calibration: Calibration | None
    threshold: float | None
    processes: Supervisor | None


def find_parts(
    target: str | Path,
    draft: str | Path | None,
    adapter: str | Path | None,
    *,
    min_p: float | None,
    zero_shot: bool,
    cut_policy: CutPolicy | None,
    calibration: str | Path | None,
    template_options: Mapping[str, Any] | None,
    target_url: Urls,
    draft_url: Urls,
    local_draft: bool | None,
    target_options: Mapping[str, Any] | None,
    draft_options: Mapping[str, Any] | None,
    max_read_tokens: int,
    api_key: str | None,
    draft_api_key: str | None,
    patience_s: float | None,
    expected: GenerationSettings | None,
    on_progress: Callable[[str], None],
) -> Parts:
    """See `connect_backend`. All names and settings are validated before a server starts."""
    target_urls, draft_urls = ([urls] if isinstance(urls, str) else list(urls) for urls in (target_url, draft_url))
    for url in (*target_urls, *draft_urls):
        if not url.startswith(("http://", "https://")):
            raise SettingsError(f"{url!r} is not a server address: it must begin with http:// or https://")
    if local_draft and draft is None:
        raise SettingsError("local_draft was given without a draft model: give draft")
    if local_draft and (draft_urls or draft_options):
        raise SettingsError(
            f"local_draft and {'draft_url' if draft_urls else 'draft_options'} were both given: choose one"
        )
    api_key = find_key("api_key", api_key, TARGET_VARIABLE)
    draft_api_key = find_key("draft_api_key", draft_api_key, DRAFT_VARIABLE)
    draft_api_key = draft_key(draft_api_key, api_key, draft_urls, target_urls)
    if max_read_tokens < 1:
        raise SettingsError(f"max_read_tokens is {max_read_tokens}; it must be at least 1")
    language = load_served_model(target, template_options=template_options)
    if adapter is None and min_p is None and not zero_shot:
        raise SettingsError("the engine needs a judge: give an adapter, min_p, or zero_shot=True")
    check_one_judge(adapter, min_p, zero_shot)
    files = None if adapter is None else read_adapter(resolve(adapter))
    judge, own_cuts, threshold = _judge(target, files, min_p, language, max_read_tokens)
    if local_draft is None:
        local_draft = not draft_urls and not draft_options and draft is not None and _small_on_cpu(draft)
    drafting: TokenizerSpec | None = None
    served_draft = ""
    if draft is not None and local_draft:
        drafting = load_language_model(draft, role="draft", template_options=template_options)
    elif draft is not None:
        try:
            drafting = load_served_model(draft, role="draft", template_options=template_options)
        except (OSError, ValueError):
            if not draft_urls:
                raise
            served_draft = str(draft)  # a name that only the server knows
    models = {
        "backend": "vllm",
        "target": str(target),
        "draft": None if draft is None else str(draft),
        "adapter": files.fingerprint if files is not None else "zero-shot" if min_p is None else MinPJudge.fingerprint,
        "cut_policy": (cut_policy or own_cuts).to_dict(),
        "template_options": dict(template_options or {}),
    }
    promises = None
    if calibration is not None:
        promises = Calibration.load(calibration)
    elif files is not None:
        promises = shipped_calibration(files.folder)
        if promises is not None and promises.backend != models["backend"]:
            promises = None  # made for the local backend
    if promises is not None and (calibration is not None or (expected is not None and expected.risk is not None)):
        unnamed = draft is None and draft_urls  # until the handshake
        promises.check(models | ({"draft": promises.models.get("draft")} if unnamed else {}))
    if expected is not None:
        check_servable(expected, promises, exact=isinstance(judge, LogprobReads))
        resolve_risk(expected, promises)
    wanted = {}
    if not target_urls:
        alone = adapter is None and min_p is None and draft is None and not draft_urls
        options = stock_options(target) if alone else plain_options(target)
        if isinstance(judge, LogprobReads):
            options |= CACHED_READS
        wanted["target"] = options | dict(target_options or {})
    if draft is not None and not draft_urls and not local_draft:
        wanted["draft"] = draft_server(draft) | dict(draft_options or {})
    processes = launch(wanted, on_progress, {"target": api_key, "draft": draft_api_key}) if wanted else None
    if processes is not None:
        target_urls, draft_urls = target_urls or processes.urls("target"), draft_urls or processes.urls("draft")
    failure: Callable[[], str | None] = (lambda: None) if processes is None else processes.failure
    if patience_s is None:
        patience_s = PATIENCE_S if processes is None else READY_S
    targets = ReplicaPool("target", target_urls, Client(api_key), failure, patience_s)
    drafts_here = isinstance(drafting, LanguageModel) or "draft" in wanted
    share_cores = "target" in wanted and drafts_here and not torch.cuda.is_available()
    drafts: tuple[ReplicaPool | InProcessDraft, TokenizerSpec | None] | None = None
    if isinstance(drafting, LanguageModel):
        drafts = InProcessDraft(drafting, share_cores), drafting
    elif draft_urls:
        client = Client(draft_api_key, key_hint=DRAFT_HINT)
        identity = Identity("draft", client, served_draft, name_key=served_draft and "draft")
        drafts = ReplicaPool("draft", draft_urls, client, failure, patience_s, identity), drafting
    learnt = train_problems_of(target, None if served_draft else draft)
    return Parts(
        Target(language, targets, judge, cut_policy or own_cuts),
        drafts,
        models,
        learnt if files is None else learnt | files.train_problems,
        promises,
        threshold,
        processes,
    )


def check_servable(settings: GenerationSettings, calibration: Calibration | None, exact: bool) -> None:
    """Raise ValueError for settings that servers cannot serve.

    Args:
        exact: the target's choices are read.
    """
    if settings.mode == "exact" and not exact:
        raise SettingsError(
            "mode 'exact' over servers reads the target's choices, as adapters on log-probabilities and min_p do: "
            "give one of these"
        )
    if settings.risk is not None and calibration is None:
        raise SettingsError(
            f"risk is {settings.risk}, but no calibration for --backend vllm was given: run `parse-infer calibrate "
            "--backend vllm` and pass its calibration.json"
        )


def _small_on_cpu(draft: str | Path) -> bool:
    """Whether the model is small enough to run in this process on a CPU."""
    folder = None if torch.cuda.is_available() else weights_folder(draft)
    return isinstance(folder, Path) and 0 < sum(f.stat().st_size for f in folder.glob("*.safetensors")) <= _SMALL


def _judge(
    target: str | Path,
    adapter: AdapterFiles | None,
    min_p: float | None,
    language: TokenizerSpec,
    max_read_tokens: int,
) -> tuple[LogprobReads | ZeroShotRequests, CutPolicy, float | None]:
    """The judge, its cut policy and its threshold."""
    if min_p is not None:
        judge = MinPJudge(language.tokenizer, min_p)
        reads = LogprobReads(judge.config, judge.head, max_read_tokens)
        return reads, CutPolicy(), min_p
    if adapter is None:
        return ZeroShotRequests(language.tokenizer, language.eos_ids), CutPolicy(), None
    config = ValidityConfig.from_dict(adapter.validity_config)
    check_target(str(adapter.folder), config.target, describe_config(load_config(target), str(target)))
    if config.logprobs is None:
        raise SettingsError(
            f"the adapter {str(adapter.folder)!r} reads the target's hidden states, which servers do not return: "
            "train one on log-probabilities (recipes/train-logprob.yaml), or use the local backend"
        )
    head = read_head(str(adapter.folder), config, adapter.head)
    assert isinstance(head, LogprobHead)
    scorer = token_scorer(config, head, language.tokenizer, language.eos_ids)
    reads = LogprobReads(config, scorer, max_read_tokens)
    return reads, CutPolicy.from_dict(config.cut_policy), config.threshold
