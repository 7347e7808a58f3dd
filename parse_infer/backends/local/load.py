"""Load the models of a `LocalBackend`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from parse_infer.backends.local.backend import LocalBackend
from parse_infer.backends.local.options import AUTO, LocalOptions
from parse_infer.calibration.calibration_file import find_calibrations
from parse_infer.calibration.schema import LOCAL
from parse_infer.judge.adapter import ValidityAdapter
from parse_infer.judge.floor import FlooredJudge
from parse_infer.judge.judge import Judge
from parse_infer.judge.registry import find_rule
from parse_infer.judge.rules.rule import TokenRule
from parse_infer.models.loading import LanguageModel, find_model, load_language_model
from parse_infer.models.names import resolve
from parse_infer.models.token_map import token_map
from parse_infer.models.train_problems import train_problems_of
from parse_infer.text.thinking import find_marks
from parse_infer.token_drafters.proposer import TokenProposer
from parse_infer.token_drafters.registry import check_token_drafter, load_token_drafter


def load_backend(
    target: str | Path,
    draft: str | Path | None = None,
    adapter: str | Path | None = None,
    **options: Any,
) -> LocalBackend:
    """Load models and judge.

    Args:
        target, draft, adapter: Hugging Face ids, folders or names of embedded models ("zoo:target", …). A model may
            also be a GGUF file, "smollm2" or a LoRA (`parse_infer.models.names`).
        options: fields of `LocalOptions`.

    Raises ValueError or OSError with one sentence for missing, damaged or mismatched files.
    """
    chosen = LocalOptions(**options)
    rule = find_rule(chosen.judge, adapter)
    if chosen.gguf_file is not None:
        file = chosen.gguf_file
        target = target / file if isinstance(target, Path) else f"{target.rstrip('/')}/{file}"
    find_model(target)  # fail on a wrong name before loading the first model
    if draft is not None:
        find_model(draft)
    if adapter is not None:
        adapter = resolve(adapter)
    calibrations = find_calibrations(chosen.calibration, adapter if rule is None else None, LOCAL)
    if chosen.target_drafter not in (None, AUTO):
        check_token_drafter("target_drafter", chosen.target_drafter, has_draft=draft is not None)
    loaded, draft_model = _load_models(target, draft, chosen)
    if chosen.thinking_marks is not None:
        loaded.thinking_marks = find_marks(loaded.tokenizer, chosen.thinking_marks)
    return LocalBackend(
        loaded,
        draft_model,
        load_judge(loaded, adapter, chosen.judge),
        target_drafter=_token_drafter(chosen.target_drafter, loaded, draft_model),
        cut_policy=chosen.cut_policy,
        calibrations=calibrations,
        train_problems=train_problems_of(target, draft),
    )


def load_judge(target: LanguageModel, adapter: str | Path | None = None, judge: str | None = None) -> Judge | None:
    """Load a trained judge, a rule, or a trained judge with a rule as its floor; None without either.

    Raises ValueError or OSError with one sentence, as `load_backend`.
    """
    rule = find_rule(judge, adapter)
    if adapter is None:
        return None if rule is None else rule.load(target.tokenizer, target.model)
    trained = ValidityAdapter.from_pretrained(resolve(adapter), target.model)
    return FlooredJudge(trained, rule) if isinstance(rule, TokenRule) else trained


def _load_models(
    target: str | Path, draft: str | Path | None, options: LocalOptions
) -> tuple[LanguageModel, LanguageModel | None]:
    load = partial(
        load_language_model,
        torch_compile=options.torch_compile,
        template_options=options.template_options,
        trust_remote_code=options.trust_remote_code,
    )
    loaded = load(
        target,
        role="target",
        dtype=options.dtype,
        device=options.device,
        revision=options.revision,
        device_map=options.device_map,
        quantization_config=options.quantization_config,
    )
    if draft is None:
        return loaded, None
    return loaded, load(
        draft,
        role="draft",
        dtype=options.draft_dtype or options.dtype,
        device=options.device if options.device_map is None else loaded.model.device,
        revision=options.draft_revision,
        quantization_config=options.draft_quantization_config,
    )


def _token_drafter(name: str | None, target: LanguageModel, draft: LanguageModel | None) -> TokenProposer | None:
    if name == AUTO:
        known = draft is not None and token_map(draft.tokenizer, target.tokenizer) is not None
        name = "draft" if known else None
    return load_token_drafter(name, target, draft) if name else None
