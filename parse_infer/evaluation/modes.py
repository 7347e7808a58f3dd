"""Benchmark modes: methods that answer the same prompts with the same models."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch

from parse_infer.calibration.held_out import HasPrompt
from parse_infer.drafters.model_drafter import ModelDrafter
from parse_infer.engine import ParseEngine
from parse_infer.errors import ParseError
from parse_infer.evaluation.assisted import AssistantSettings, TransformersGeneration
from parse_infer.evaluation.mode_names import (
    DRAFTING,
    NO_DRAFTER,
    SWEPT,
    base_of,
    block_tokens_of,
    check_modes,
    drafter_of,
    is_adaptive,
    is_stream,
    judge_of,
    needs,
)
from parse_infer.evaluation.records import Record
from parse_infer.judge.judge import Judge
from parse_infer.judge.registry import find_rule
from parse_infer.models.devices import wait_for
from parse_infer.models.loading import same_tokenizer
from parse_infer.models.token_map import token_map
from parse_infer.request.events import Done
from parse_infer.request.output import Generation
from parse_infer.settings.acceptance import check_threshold
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import seed_of
from parse_infer.text.prompts import Prompt
from parse_infer.token_drafters.registry import load_token_drafter

Answer = Callable[[Prompt], Generation]


class BenchProblem(HasPrompt, Protocol):
    """Interface of a benchmark problem."""

    @property
    def reference(self) -> str: ...


def problems_digest(problems: Sequence[BenchProblem]) -> str:
    """Digest that identifies problems, by id, prompt and reference."""
    rows = [[p.id, p.prompt, p.reference] for p in problems]
    return hashlib.sha256(json.dumps(rows, ensure_ascii=False, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Mode:
    """One benchmark mode.

    Attributes:
        name: see `parse_infer.evaluation.mode_names`.
        engine: the mode's engine, if its models have their own caches.
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
    """Build the named modes, then "parse@0.5" and so on for every threshold of a sweep, with `engine`'s models.

    The draft model is the token drafter of the PARSE modes and "sequential", as in `from_pretrained`; "target" and
    "draft" have none. The token drafters of `engine` are not used.

    Args:
        settings: their `resume_sampling` applies to all modes, also to the draft model alone and to what it proposes
            token by token; `draft_sampling` to the drafts that a judge reads; their threshold to modes with the
            adapter (None: the adapter's own); `block_tokens` to the PARSE modes.
        zero_shot_threshold: threshold of "parse-zero-shot"; None: 0.5.
        thresholds: thresholds of the sweep, which covers the named modes that are in `SWEPT`.

    Raises:
        ValueError: an unknown mode, a threshold out of range, or a mode without its draft model or adapter.
    """
    names = check_modes(names)
    for name in names:
        draft, adapter = needs([name])
        if draft and engine.draft is None:
            raise ParseError(f"mode {name!r} needs a draft model: give one, or leave the mode out")
        if adapter and engine.backend.judge is None:
            raise ParseError(f"mode {name!r} needs an adapter: give one, or leave the mode out")
    for value in (*thresholds, *([] if zero_shot_threshold is None else [zero_shot_threshold])):
        check_threshold(value)
    judged = settings or GenerationSettings()
    plain = judged.override(threshold=None)
    modes, sweep = [], []
    for name in names:
        base = base_of(name)
        if name == "draft":
            alone = plain.override(draft_sampling=plain.resume_sampling)
            modes.append(Mode(name, _draft_alone(engine, alone)))
        elif base in ("assisted", "transformers"):
            assistant = AssistantSettings.parse(name)
            own_loop = TransformersGeneration(engine.target, engine.draft if base == "assisted" else None, assistant)
            modes.append(Mode(name, _with(own_loop.generate, plain)))
        elif base == "target":
            drafter = drafter_of(name)
            speculating = _with_proposer(engine, drafter) if drafter else engine
            modes.append(Mode(name, _with(speculating.generate_target, plain, speculate=bool(drafter)), speculating))
        else:
            judge: Judge | None = None
            judge_threshold = None
            length = block_tokens_of(name) or judged.block_tokens
            own = judged.override(block_tokens=length, adaptive=is_adaptive(name) or judged.adaptive)
            if base == "sequential":
                own = judged
            elif (rule := find_rule(judge_of(name))) is not None:
                judge = rule.load(engine.target.tokenizer, engine.target.model)
                judge_threshold = zero_shot_threshold if base == "parse-zero-shot" else None
                own = own.override(threshold=None)
            parse = _with_proposer(
                engine, _proposer_of(engine, name), judge, judge_threshold, one_segment=base == "sequential"
            )
            modes.append(Mode(name, _streamed(parse, own) if is_stream(name) else _with(parse.generate, own), parse))
            for threshold in thresholds if name in SWEPT else ():
                at = own.override(threshold=threshold)
                sweep.append(Mode(f"{name}@{threshold}", _with(parse.generate, at), parse))
    return modes + sweep


def timed(engine: ParseEngine, mode: Mode, prompt: Prompt) -> tuple[Generation, float]:
    """Generate an answer from empty caches, so that no mode profits from another; return it with its seconds."""
    engine.clear_caches()
    if mode.engine is not None:
        mode.engine.clear_caches()
    device = engine.target.model.device
    wait_for(device)
    start = time.perf_counter()
    generation = mode.generate(prompt)
    wait_for(device)
    return generation, time.perf_counter() - start


def answer(
    engine: ParseEngine,
    mode: Mode,
    problem: BenchProblem,
    check: Callable[[Any, str], bool | None],
    repeat: int = 0,
) -> Record:
    """Measure one answer of one mode."""
    # Without a seed in the settings, chains of lossless sampling end where they stop paying, as greedy ones do.
    torch.manual_seed(seed_of(problems_digest([problem]), mode.name, repeat))
    generation, seconds = timed(engine, mode, problem.prompt)
    own: dict[str, Any] = {}
    if mode.base not in DRAFTING:
        own = dict.fromkeys(("draft_tokens", "accepted_tokens", "exact_tail_tokens"))
    if mode.name == "draft":
        prefill_s, own["token_exact_tokens"] = read_draft(engine, problem.prompt, generation.token_ids)
        own["prefill_s"] = round(prefill_s, 4)
    correct = check(problem, generation.text)
    own |= {"problem_id": problem.id, "digest": problems_digest([problem])}
    return Record.of(generation, seconds, mode=mode.name, repeat=repeat, correct=correct, **own)


@torch.inference_mode()
def read_draft(engine: ParseEngine, prompt: Prompt, draft: Sequence[int]) -> tuple[float, int]:
    """Time one target forward over prompt and draft, and count the draft's greedy matches.

    Returns:
        Seconds of the forward, from an empty cache; the number of leading draft tokens (target tokens) that equal the
        target's greedy choice, which token-exact verification would accept.
    """
    engine.clear_caches()
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


def _with(generate: Callable[..., Any], settings: GenerationSettings, **more: bool) -> Answer:
    return lambda prompt: generate(prompt, settings, **more)


def _proposer_of(engine: ParseEngine, name: str) -> str:
    """The token drafter of a PARSE mode: the named one, else the draft model if it fits."""
    assert engine.draft is not None
    fits = token_map(engine.draft.tokenizer, engine.target.tokenizer) is not None
    return drafter_of(name) or ("draft" if fits else NO_DRAFTER)


def _with_proposer(
    engine: ParseEngine,
    target_drafter: str,
    judge: Judge | None = None,
    threshold: float | None = None,
    *,
    one_segment: bool = False,
) -> ParseEngine:
    """The same weights with their own decoders (heads need stored features) and this token drafter.

    Args:
        judge, threshold: instead of the engine's; None: the engine's judge with its threshold.
        one_segment: the draft model writes one segment at a time, as in SpecReason (arXiv 2504.07891): the target
            judges each one before the draft model continues. Everything else is PARSE's.
    """
    target, draft = replace(engine.target), replace(engine.draft) if engine.draft is not None else None
    policy = engine.backend.segmenter.policy
    if judge is None and (judge := cast("Judge | None", engine.backend.judge)) is not None:  # a local backend's
        threshold = engine.threshold if engine.threshold != engine.backend.threshold else None
    return ParseEngine.from_models(
        target,
        draft,
        judge=judge,
        threshold=threshold,
        drafter=ModelDrafter(draft, target, one_segment=policy) if one_segment and draft is not None else None,
        target_drafter=load_token_drafter(target_drafter, target, draft) if target_drafter != NO_DRAFTER else None,
        cut_policy=policy,
    )


def _streamed(engine: ParseEngine, settings: GenerationSettings) -> Answer:
    def generate(prompt: Prompt) -> Generation:
        *_, last = engine.stream(prompt, settings)
        assert isinstance(last, Done)
        return last.generation

    return generate


def _draft_alone(engine: ParseEngine, settings: GenerationSettings) -> Answer:
    """The draft model alone, with its tokens counted as target tokens."""
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
