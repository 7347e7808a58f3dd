"""The modes of a benchmark: different ways to answer the same prompt with the same models, measured alike."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from parse_infer.acceptance import check_threshold
from parse_infer.engine import ParseEngine
from parse_infer.evaluation.assisted import AssistantSettings, TransformersGeneration
from parse_infer.evaluation.mode_names import (
    NOBODY,
    SWEPT,
    base_of,
    check_guides,
    check_modes,
    drafters_of,
    is_adaptive,
    needs,
    resume_of,
)
from parse_infer.evaluation.sequential import sequential_engine, sequentially
from parse_infer.judge.zero_shot import ZeroShotJudge
from parse_infer.models.devices import wait_for
from parse_infer.models.loading import same_tokenizer
from parse_infer.models.prompts import Prompt
from parse_infer.models.token_map import token_map
from parse_infer.output import Generation
from parse_infer.settings import GenerationSettings
from parse_infer.speculation.registry import load_token_drafter

Answer = Callable[[Prompt], Generation]


class BenchProblem(Protocol):
    """What the benchmark needs of a problem."""

    @property
    def id(self) -> str: ...

    @property
    def prompt(self) -> Prompt: ...

    @property
    def reference(self) -> str: ...


def problems_digest(problems: Sequence[BenchProblem]) -> str:
    """Tells whether the problems of two runs are the same."""
    rows = [[p.id, p.prompt, p.reference] for p in problems]
    return hashlib.sha256(json.dumps(rows, ensure_ascii=False, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Mode:
    """One way to answer.

    Attributes:
        name: see `parse_infer.evaluation.mode_names`.
        engine: the one that answers, where its models have caches of their own.
    """

    name: str
    generate: Answer
    engine: ParseEngine | None = None

    @property
    def base(self) -> str:
        """The key of `MODES`."""
        return base_of(self.name)


def make_modes(
    engine: ParseEngine,
    names: Sequence[str],
    settings: GenerationSettings | None = None,
    *,
    zero_shot_threshold: float | None = None,
    thresholds: Sequence[float] = (),
) -> list[Mode]:
    """The named modes, then "parse@0.5" and so on for every threshold of a sweep; all with `engine`'s models.

    The PARSE modes and "sequential" have the draft model guess what the target writes, as `from_pretrained` does, and
    "target" and "draft" nobody: the token drafters of `engine` play no part.

    Args:
        settings: greedy ones. Their threshold is that of the adapter's modes (None: the adapter's own), `resume`
            applies to the PARSE modes.
        zero_shot_threshold: for "parse-zero-shot"; None: 0.5.
        thresholds: of the sweep; it covers those of `SWEPT` that are among the names.

    Raises:
        ValueError: an unknown mode, a threshold out of range, or a part that a mode needs and the engine lacks.
    """
    names = check_modes(names)
    for name in names:
        draft, adapter = needs([name])
        if draft and engine.draft is None:
            raise ValueError(f"mode {name!r} needs a draft model: give one, or leave the mode out")
        if adapter and engine.backend.judge is None:
            raise ValueError(f"mode {name!r} needs an adapter: give one, or leave the mode out")
    check_guides(names, engine.target.name, engine.draft.name if engine.draft else None)
    for value in (*thresholds, *([] if zero_shot_threshold is None else [zero_shot_threshold])):
        check_threshold(value)
    judged = settings or GenerationSettings()
    plain = judged.override(threshold=None)
    modes, sweep = [], []
    for name in names:
        base = base_of(name)
        if name == "draft":
            modes.append(Mode(name, _draft_alone(engine, plain)))
        elif base in ("assisted", "transformers"):
            assistant = AssistantSettings.parse(name)
            own_loop = TransformersGeneration(engine.target, engine.draft if base == "assisted" else None, assistant)
            modes.append(Mode(name, _with(own_loop.generate, plain)))
        elif base == "target":
            drafters = drafters_of(name)
            guided = _guided(engine, *drafters) if drafters else engine
            modes.append(Mode(name, _with(guided.generate_target, plain, speculate=bool(drafters)), guided))
        elif base == "sequential":
            sequential = sequential_engine(_guided(engine, *_guesses(engine, name)))
            modes.append(Mode(name, _with(sequential.generate, sequentially(judged)), sequential))
        else:
            resume = resume_of(name) or judged.resume
            parse, own = _guided(engine, *_guesses(engine, name)), judged
            if base == "parse-zero-shot":
                parse, own = _zero_shot(parse, zero_shot_threshold), plain
            own = own.override(resume=resume, adaptive=is_adaptive(name))
            modes.append(Mode(name, _with(parse.generate, own), parse))
            for threshold in thresholds if name in SWEPT else ():
                at = own.override(threshold=threshold)
                sweep.append(Mode(f"{name}@{threshold}", _with(parse.generate, at), parse))
    return modes + sweep


def timed(engine: ParseEngine, mode: Mode, prompt: Prompt) -> tuple[Generation, float]:
    """An answer and the seconds it took, from empty caches: no mode profits from what another has read."""
    clear_caches(engine, mode.engine)
    device = engine.target.model.device
    wait_for(device)
    start = time.perf_counter()
    generation = mode.generate(prompt)
    wait_for(device)
    return generation, time.perf_counter() - start


def clear_caches(*engines: ParseEngine | None) -> None:
    """Empty the caches of the engines' models."""
    for engine in engines:
        if engine is not None:
            engine.clear_caches()


@torch.inference_mode()
def read_draft(engine: ParseEngine, prompt: Prompt, draft: Sequence[int]) -> tuple[float, int]:
    """What the target needs to read prompt and draft once, and how much of the draft it would have written itself.

    Returns:
        Seconds of one target forward over both, from an empty cache; the number of leading draft tokens (target
        tokens) that equal the target's greedy choice, which is what token-exact verification would keep.
    """
    clear_caches(engine)
    decoder, device = engine.target.decoder, engine.target.model.device
    prompt_ids = engine.target.render(prompt)
    draft = list(draft[: engine.target.window - len(prompt_ids)])
    wait_for(device)
    start = time.perf_counter()
    decoder.seek(prompt_ids)
    output = decoder.forward(draft)
    wait_for(device)
    seconds = time.perf_counter() - start
    own = decoder.logits(output.hidden[:-1]).argmax(-1).tolist()
    return seconds, next((i for i, (a, b) in enumerate(zip(own, draft, strict=True)) if a != b), len(draft))


def _with(generate: Callable[..., Any], settings: GenerationSettings, **more: Any) -> Answer:
    return lambda prompt: generate(prompt, settings, **more)


def _guesses(engine: ParseEngine, name: str) -> list[str]:
    """Who guesses in a mode, for the target and the draft model: those it names, else the draft model if it can."""
    assert engine.draft is not None
    tokens = token_map(engine.draft.tokenizer, engine.target.tokenizer)
    return drafters_of(name) or (["draft"] if tokens is not None else [NOBODY])


def _guided(engine: ParseEngine, target_drafter: str = NOBODY, draft_drafter: str | None = None) -> ParseEngine:
    """The same weights with decoders of their own (heads have them keep features), and token drafters."""
    target, draft = replace(engine.target), replace(engine.draft) if engine.draft is not None else None
    return ParseEngine.from_models(
        target,
        draft,
        engine.backend.judge,
        target_drafter=load_token_drafter(target_drafter, target, draft) if target_drafter != NOBODY else None,
        draft_drafter=load_token_drafter(draft_drafter, draft) if draft_drafter and draft is not None else None,
        threshold=engine.threshold,
        cut_policy=engine.backend.segmenter.policy,
    )


def _zero_shot(engine: ParseEngine, threshold: float | None) -> ParseEngine:
    """The same loaded models and guesses with the untrained judge, and the same cuts."""
    judge = ZeroShotJudge(engine.target.model, engine.target.tokenizer, engine.backend.segmenter.policy)
    return ParseEngine.from_models(
        engine.target, engine.draft, judge, target_drafter=engine.backend.target_drafter, threshold=threshold
    )


def _draft_alone(engine: ParseEngine, settings: GenerationSettings) -> Answer:
    """The draft model alone, its tokens counted as target tokens, as all others are."""
    assert engine.draft is not None
    target, shared = engine.target, same_tokenizer(engine.draft.tokenizer, engine.target.tokenizer)

    def generate(prompt: Prompt) -> Generation:
        own: Generation = engine.generate_draft(prompt, settings)  # type: ignore[assignment]
        if shared:
            return own
        ids = target.tokenizer.encode(own.text, add_special_tokens=False)
        if own.finish_reason == "eos" and target.end_token is not None:
            ids = [*ids, target.end_token]
        return replace(own, token_ids=ids)

    return generate
