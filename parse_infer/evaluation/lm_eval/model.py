"""lm-eval model over an engine: it answers each request with the target alone and with PARSE."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from rich.console import Console

from parse_infer.calibration.record_runner import run_missing
from parse_infer.calibration.record_store import RecordStore
from parse_infer.engine import ParseEngine
from parse_infer.errors import ParseError
from parse_infer.evaluation.modes import Mode, timed
from parse_infer.evaluation.records import AnswerFigures
from parse_infer.request.output import Generation
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import seed_of
from parse_infer.text.prompts import Prompt, Verbatim

MODES = ("target", "parse")


@dataclass(frozen=True, kw_only=True)
class EvalRecord(AnswerFigures):
    """One answer of one mode. `text` is lm-eval's, without the final stop string."""

    request: str
    """Digest of task, problem, prompt, stop strings and token limit, and of the number of the sample."""
    mode: str
    task: str
    problem: int

    @property
    def key(self) -> tuple[str, str]:
        return self.request, self.mode


@dataclass(frozen=True)
class _Request:
    task: str
    problem: int
    prompt: Prompt
    settings: GenerationSettings
    digest: str


class ParseLM(LM):
    """lm-eval model that generates, without log-likelihoods.

    The first evaluation answers each request in both modes, one right after the other, so that a slow machine affects
    both alike. The other mode's evaluation, and a continued run, read the stored answers.

    Args:
        store: store of answers.
        settings: settings of PARSE; the tasks set `max_new_tokens` and `stop`. If the target samples, each request has
            a seed of its own, the same in both modes.
        max_new_tokens: overrides the tasks' own limit.
        console: console of the progress bar.

    Attributes:
        mode: the mode in `MODES` whose answers lm-eval gets.
        sample: number of the evaluation, which has random numbers of its own if the target samples.
        requested: requests of the last evaluation, by task: store keys without the mode.
    """

    def __init__(
        self,
        engine: ParseEngine,
        store: RecordStore[EvalRecord],
        settings: GenerationSettings | None = None,
        max_new_tokens: int | None = None,
        console: Console | None = None,
    ) -> None:
        super().__init__()
        self.mode, self.sample = MODES[0], 0
        self.requested: dict[str, list[str]] = {}
        self._engine = engine
        self._store = store
        self._settings = settings or GenerationSettings()
        self._max_new_tokens = max_new_tokens
        self._console = console

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the answers of `mode`, each cut before its first stop string.

        Raises ValueError for a prompt beyond a model's context window, before it answers any prompt.
        """
        repeats: Counter[int] = Counter()
        requested = []
        for instance in requests:  # lm-eval repeats an instance for each further sample that a task wants
            requested.append(self._read(instance, repeats[id(instance)]))
            repeats[id(instance)] += 1
        self.requested = {}
        for each in requested:
            self.requested.setdefault(each.task, []).append(each.digest)
        runs = {
            (request.digest, mode): (request, mode)
            for i, request in enumerate({each.digest: each for each in requested}.values())
            for mode in (MODES if i % 2 == 0 else MODES[::-1])  # alternate which mode comes first
        }
        run_missing(self._store, runs, self._measure, "eval", self._console)
        return [self._store.records[each.digest, self.mode].text for each in requested]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Raise ValueError: answers of two models have no log-likelihood."""
        raise ParseError(
            f"task {requests[0].task_name!r} needs log-likelihoods, which answers of two models do not have: choose a "
            "task that generates its answers"
        )

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Raise ValueError, as `loglikelihood` does."""
        self.loglikelihood(requests)
        return []

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Encode the messages unchanged: each of the two models applies its own template."""
        return _CHAT + json.dumps(chat_history)

    @property
    def tokenizer_name(self) -> str:
        return self._engine.target.name

    def _read(self, instance: Instance, repeat: int) -> _Request:
        context, options = instance.args[:2]
        options = normalize_gen_kwargs(options)
        settings = self._settings.override(
            max_new_tokens=self._max_new_tokens or options["max_gen_toks"],
            stop=tuple(stop for stop in options["until"] if stop),
        )
        task, problem = str(instance.task_name), int(instance.doc_id or 0)
        prompt = json.loads(context[len(_CHAT) :]) if context.startswith(_CHAT) else Verbatim(context)
        identity = [task, problem, instance.idx, context, settings.stop, settings.max_new_tokens]
        sampling = settings.resume_sampling
        if not sampling.greedy:
            identity += [repeat, self.sample] if self.sample else [repeat]
            settings = settings.override(resume_sampling=replace(sampling, seed=seed_of(*identity)))
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        return _Request(task, problem, prompt, settings, digest)

    def _measure(self, pending: list[tuple[_Request, str]]) -> Iterator[EvalRecord]:
        for model in filter(None, (self._engine.target, self._engine.draft)):
            for request in {request.digest: request for request, _ in pending}.values():
                try:
                    model.render(request.prompt)
                except ValueError as error:
                    where = f"problem {request.problem} of {request.task} (fewer examples: --num-fewshot)"
                    raise ParseError(f"{where}: {error}") from error
        for mode in MODES:
            self._timed(pending[0][0], mode)  # warm-up
        for request, mode in pending:
            answer, seconds = self._timed(request, mode)
            yield EvalRecord.of(
                answer,
                seconds,
                request=request.digest,
                mode=mode,
                task=request.task,
                problem=request.problem,
                text=postprocess_generated_text(answer.text, list(request.settings.stop), None),
            )

    def _timed(self, request: _Request, mode: str) -> tuple[Generation, float]:
        engine = self._engine
        generate: Callable[..., Any] = engine.generate if mode == "parse" else engine.generate_target
        return timed(engine, Mode(mode, lambda prompt: generate(prompt, request.settings)), request.prompt)


_CHAT = "\x00chat:"  # marks a prompt of encoded messages: lm-eval passes prompts as text
