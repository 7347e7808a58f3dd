"""Connect to the servers of a `ServerBackend`; start one for each model without address."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from parse_infer.backends.launch.supervisor import READY_S, Supervisor
from parse_infer.backends.launch.vllm_process import (
    CACHED_READS,
    draft_server,
    launch,
    plain_options,
    shell_command,
    stock_options,
)
from parse_infer.backends.pool.client import Client
from parse_infer.backends.pool.identity import Identity
from parse_infer.backends.pool.replicas import PATIENCE_S, ReplicaPool
from parse_infer.backends.servers.api_keys import DRAFT_HINT, DRAFT_VARIABLE, TARGET_VARIABLE, draft_key, find_key
from parse_infer.backends.servers.backend import ServerBackend
from parse_infer.backends.servers.in_process_draft import InProcessDraft
from parse_infer.backends.servers.logprob_reads import LogprobReads
from parse_infer.backends.servers.options import ServerOptions
from parse_infer.backends.servers.parts import Parts, check_servable
from parse_infer.backends.servers.target import Target
from parse_infer.backends.servers.zero_shot_requests import ZeroShotRequests
from parse_infer.calibration.calibration_file import find_calibrations
from parse_infer.calibration.promises import check_default_risk
from parse_infer.calibration.schema import Calibration
from parse_infer.errors import SettingsError
from parse_infer.judge.adapter import ValidityAdapter, ValidityConfig, check_target, read_head
from parse_infer.judge.adapter_files import AdapterFiles, read_adapter
from parse_infer.judge.floor import FlooredScorer, floored
from parse_infer.judge.logprob_head import LogprobHead
from parse_infer.judge.registry import Rule, find_rule
from parse_infer.judge.rules.min_p import MinP
from parse_infer.judge.rules.rule import TokenRule
from parse_infer.judge.zero_shot import ZeroShot
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
from parse_infer.text.cuts import CutPolicy
from parse_infer.text.thinking import find_marks
from parse_infer.text.tokenizer_spec import TokenizerSpec

_SMALL = 32 * 2**20  # bytes of weights; reading more per token costs more than a server's overhead


def connect_backend(
    target: str | Path,
    draft: str | Path | None = None,
    adapter: str | Path | None = None,
    **options: Any,
) -> ServerBackend:
    """Connect to servers, or start them.

    Args:
        target, draft, adapter: as in `ParseEngine.from_pretrained`.
        options: fields of `ServerOptions`.

    Raises:
        OSError: a file or package is missing, or no server of a model answers.
        ValueError: parts do not fit together, or a server serves another model or adapter.
    """
    chosen = ServerOptions(**options)
    backend = ServerBackend(find_parts(target, draft, adapter, chosen), chosen.parallel)
    try:
        backend.run(backend.handshake())
        if chosen.calibration is not None:
            for calibration in backend.calibrations:
                calibration.check(backend.describe())
    except BaseException:
        backend.close()
        raise
    return backend


def find_parts(
    target: str | Path, draft: str | Path | None, adapter: str | Path | None, options: ServerOptions
) -> Parts:
    """Find the parts of a `ServerBackend`. All names and settings are validated before a server starts."""
    if options.local_draft and draft is None:
        raise SettingsError("local_draft was given without a draft model: give draft")
    api_key = find_key("api_key", options.api_key, TARGET_VARIABLE)
    draft_api_key = draft_key(
        find_key("draft_api_key", options.draft_api_key, DRAFT_VARIABLE),
        api_key,
        options.draft_urls,
        options.target_urls,
    )
    language = load_served_model(target, template_options=options.template_options)
    if options.thinking_marks is not None:
        language.thinking_marks = find_marks(language.tokenizer, options.thinking_marks)
    rule = find_rule(options.judge, adapter)
    files = None if adapter is None else read_adapter(resolve(adapter))
    judge: LogprobReads | ZeroShotRequests | None
    judge, own_cuts, threshold = _judge(target, files, rule, language, options.max_read_tokens)
    if files is None and rule is None and draft is None and not options.draft_urls:
        judge = None  # the target alone needs no reads
    cut_policy = options.cut_policy or own_cuts
    drafting, served_draft = _find_draft(draft, options)
    models = {
        "backend": "vllm",
        "target": str(target),
        "draft": None if draft is None else str(draft),
        "adapter": _judge_name(files, options.judge, rule),
        "cut_policy": cut_policy.to_dict(),
        "template_options": dict(options.template_options or {}),
    }
    calibrations = _find_calibrations(files, models, options)
    if options.expected is not None:
        check_servable(options.expected, calibrations, exact=isinstance(judge, LogprobReads))
        check_default_risk(options.expected, calibrations)
    missing = _servers_to_start(target, draft, drafting, judge, options)
    if missing and not options.start_servers:
        raise SettingsError(_commands(missing))
    keys = {"target": api_key, "draft": draft_api_key}
    processes = launch(missing, options.on_progress, keys) if missing else None
    targets, drafts = _replicas(options, processes, keys, served_draft)
    drafter: tuple[ReplicaPool | InProcessDraft, TokenizerSpec | None] | None = None
    if isinstance(drafting, LanguageModel):
        shares_cores = "target" in missing and not torch.cuda.is_available()
        drafter = InProcessDraft(drafting, shares_cores), drafting
    elif drafts is not None:
        drafter = drafts, drafting
    train_problems = train_problems_of(target, None if served_draft else draft)
    return Parts(
        Target(language, targets, judge, cut_policy),
        drafter,
        models,
        train_problems if files is None else train_problems | files.train_problems,
        calibrations,
        threshold,
        processes,
    )


def _find_draft(draft: str | Path | None, options: ServerOptions) -> tuple[TokenizerSpec | None, str]:
    """The draft model, a `LanguageModel` if this process runs it, and its name if only its server knows it."""
    if draft is None:
        return None, ""
    in_process = options.local_draft
    if in_process is None:
        in_process = not options.draft_urls and not options.draft_options and _small_on_cpu(draft)
    if in_process:
        return load_language_model(draft, role="draft", template_options=options.template_options), ""
    try:
        return load_served_model(draft, role="draft", template_options=options.template_options), ""
    except (OSError, ValueError):
        if not options.draft_urls:
            raise
        return None, str(draft)


def _judge_name(adapter: AdapterFiles | None, judge: str | None, rule: Rule | None) -> str | None:
    if adapter is not None:
        return floored(adapter.fingerprint, rule) if isinstance(rule, TokenRule) else adapter.fingerprint
    if isinstance(rule, TokenRule):
        return rule.fingerprint
    return None if judge is None else judge.partition(":")[0].replace("_", "-")


def _find_calibrations(
    adapter: AdapterFiles | None, models: Mapping[str, Any], options: ServerOptions
) -> tuple[Calibration, ...]:
    """The given calibrations, or the adapter's. Raises ValueError if needed ones hold for other models."""
    shipped = None if adapter is None or options.judge is not None else adapter.folder  # the adapter's have no floor
    found = find_calibrations(options.calibration, shipped, models["backend"])
    if options.calibration is not None or (options.expected is not None and options.expected.risk is not None):
        unnamed = models["draft"] is None and options.draft_urls  # until the handshake
        for each in found:
            each.check({**models, **({"draft": each.models.get("draft")} if unnamed else {})})
    return found


def _servers_to_start(
    target: str | Path,
    draft: str | Path | None,
    drafting: TokenizerSpec | None,
    judge: LogprobReads | ZeroShotRequests | None,
    options: ServerOptions,
) -> dict[str, dict[str, Any]]:
    """vLLM's options of each model that has no address, by role."""
    missing: dict[str, dict[str, Any]] = {}
    if not options.target_urls:
        reads = isinstance(judge, LogprobReads)
        alone = not reads and draft is None and not options.draft_urls
        own = stock_options(target) if alone else plain_options(target)
        missing["target"] = own | (CACHED_READS if reads else {}) | dict(options.target_options or {})
    if draft is not None and not options.draft_urls and not isinstance(drafting, LanguageModel):
        missing["draft"] = draft_server(draft) | dict(options.draft_options or {})
    return missing


def _commands(missing: Mapping[str, Mapping[str, Any]]) -> str:
    """How to start the missing servers, in one sentence."""
    ports = {"target": 8001, "draft": 8002}
    parts = [
        f"start the {role}'s server with `{shell_command(options, ports[role])}` and give "
        f"--{role}-url http://127.0.0.1:{ports[role]}"
        for role, options in missing.items()
    ]
    return f"no address of {' and '.join(missing)} was given: {'; '.join(parts)}"


def _replicas(
    options: ServerOptions, processes: Supervisor | None, keys: Mapping[str, str | None], served_draft: str
) -> tuple[ReplicaPool, ReplicaPool | None]:
    """The replicas of the target, and of the draft model if servers run it."""
    target_urls, draft_urls = options.target_urls, options.draft_urls
    shared: dict[str, Any] = {"patience_s": PATIENCE_S}
    if processes is not None:
        target_urls, draft_urls = target_urls or processes.urls("target"), draft_urls or processes.urls("draft")
        shared = {"patience_s": READY_S, "failure": processes.failure}
    if options.patience_s is not None:
        shared["patience_s"] = options.patience_s
    targets = ReplicaPool("target", target_urls, Client(keys["target"]), **shared)
    if not draft_urls:
        return targets, None
    client = Client(keys["draft"], key_hint=DRAFT_HINT)
    identity = Identity("draft", client, served_draft, name_key=served_draft and "draft")
    return targets, ReplicaPool("draft", draft_urls, client, identity=identity, **shared)


def _small_on_cpu(draft: str | Path) -> bool:
    """Whether the model is small enough to run in this process on a CPU."""
    folder = None if torch.cuda.is_available() else weights_folder(draft)
    return isinstance(folder, Path) and 0 < sum(f.stat().st_size for f in folder.glob("*.safetensors")) <= _SMALL


def _judge(
    target: str | Path,
    adapter: AdapterFiles | None,
    rule: Rule | None,
    language: TokenizerSpec,
    max_read_tokens: int,
) -> tuple[LogprobReads | ZeroShotRequests, CutPolicy, float | None]:
    """The judge, its cut policy and its threshold."""
    if isinstance(rule, ZeroShot):
        return ZeroShotRequests(language.tokenizer, language.eos_ids), CutPolicy(), None
    if rule is not None and adapter is None:
        judge = rule.load(language.tokenizer, None)
        scorer = judge.scorer(language.tokenizer, language.eos_ids)
        return LogprobReads(judge.config, scorer, max_read_tokens), CutPolicy(), judge.config.threshold
    if adapter is None:  # lossless speculation reads the target's choices
        return LogprobReads(MinP().load(language.tokenizer).config, None, max_read_tokens), CutPolicy(), None
    config = ValidityConfig.from_dict(adapter.validity_config)
    check_target(str(adapter.folder), config.target, describe_config(load_config(target), str(target)))
    if config.stream is not None:
        raise SettingsError(
            f"the adapter {str(adapter.folder)!r} reads hidden states of the target, which servers do not return: "
            f"use the adapter it was trained from, {config.stream['start_from']!r}, or the local backend"
        )
    head = read_head(str(adapter.folder), config, adapter.head)
    assert isinstance(head, LogprobHead)
    scorer = ValidityAdapter(config, head).scorer(language.tokenizer, language.eos_ids)
    if isinstance(rule, TokenRule):
        scorer = FlooredScorer(scorer, rule)
    reads = LogprobReads(config, scorer, max_read_tokens)
    return reads, CutPolicy.from_dict(config.cut_policy), config.threshold
