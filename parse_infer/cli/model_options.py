"""The models behind a command: one dataclass, whose fields are options of every command that has a parameter of it."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from parse_infer.cli.options import Device, Dtype, check_device, check_dtype, read_pairs
from parse_infer.suggest import suggestion

if TYPE_CHECKING:
    from parse_infer.engine import ParseEngine
    from parse_infer.judge.adapter_files import AdapterFiles
    from parse_infer.settings import GenerationSettings

NOBODY = "none"
# The embedded targets, each with the draft model and the adapter made for it.
PAIRS = {
    "zoo:target": ("zoo:draft", "zoo:adapter"),
    "zoo:smollm2": ("zoo:smollm2-draft", "zoo:smollm2-adapter"),
}
PAIR_NAMES = {"tiny": "zoo:target", "smollm2": "zoo:smollm2"}


@dataclass(frozen=True)
class ModelOptions:
    """Which models, and how they are loaded. The embedded ones stand in for one another only."""

    threshold: Annotated[
        float | None,
        typer.Option(
            help="Keep a prefix whose validity is at least this; no validity is more than 1. Default: the adapter's."
        ),
    ] = None
    target: Annotated[
        str | None,
        typer.Option(help="Hugging Face id, folder, GGUF file, smollm2, zoo:target (the default) or zoo:smollm2."),
    ] = None
    draft: Annotated[str | None, typer.Option(help="Draft model; default: what is embedded for the target.")] = None
    adapter: Annotated[str | None, typer.Option(help="Trained adapter; default: what is embedded for the target.")] = (
        None
    )
    zero_shot: Annotated[
        bool, typer.Option("--zero-shot", help="No adapter: ask the target itself whether each prefix is right.")
    ] = False
    calibration: Annotated[
        str | None,
        typer.Option(help="calibration.json that --risk goes by; default: that in the adapter's folder."),
    ] = None
    target_drafter: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Who guesses tokens of what the target writes; greedy answers stay the same (in float32). auto: the "
            "draft model, where it is there and its tokens are the target's. none, lookup, draft, eagle3, parallel, "
            "medusa, or the folder of a head; sizes behind it as in eagle3:tokens=4:top_k=3.",
        ),
    ] = "auto"
    draft_drafter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The same for what the draft model writes. lookup, parallel, or a folder; default: nobody.",
        ),
    ] = None
    backend: Annotated[
        str,
        typer.Option(metavar="local|vllm", help="vllm: servers of vLLM, many requests at a time (docs/vllm.md)."),
    ] = "local"
    target_url: Annotated[
        list[str] | None,
        typer.Option(help="Server of the target, for --backend vllm; repeatable. Default: one is started."),
    ] = None
    draft_url: Annotated[
        list[str] | None, typer.Option(help="Server of the draft model; repeatable. Default: one is started.")
    ] = None
    local_draft: Annotated[
        bool | None,
        typer.Option(
            "--local-draft/--draft-server",
            help="With --backend vllm: the draft model runs in this process, or in a server. Default: here if it is "
            "small (32 MiB) and there is no GPU.",
        ),
    ] = None
    server_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", help="API key of these servers; default: none.")
    ] = None
    device: Device = None
    dtype: Dtype = "auto"
    template_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Switch of the chat templates, for example enable_thinking=false; repeatable."
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a model.")
    ] = False

    @property
    def target_name(self) -> str:
        return self.target or "zoo:target"

    @property
    def draft_name(self) -> str:
        """Raises ValueError where none is given and none is embedded."""
        if self.draft is None and self.target_name not in PAIRS:
            raise ValueError(f"the target {self.target!r} needs a draft model of its own: give one with --draft")
        return self.draft or PAIRS[self.target_name][0]

    @property
    def adapter_name(self) -> str:
        """Raises ValueError where none is given and none is embedded."""
        if self.adapter is None and self.target_name not in PAIRS:
            raise ValueError(
                f"the target {self.target!r} needs an adapter of its own: give one with --adapter, or use what needs "
                "none (--zero-shot, --mode exact, or other --modes of bench)"
            )
        return self.adapter or PAIRS[self.target_name][1]

    def load(
        self,
        *,
        needs_draft: bool = True,
        needs_judge: bool = True,
        target_options: dict[str, Any] | None = None,
        expected: GenerationSettings | None = None,
    ) -> ParseEngine:
        """Load what is named or needed; with --backend vllm, servers without an address are started.

        Args:
            target_options: more options of vLLM for a target server that is started.
            expected: settings of the requests to come.

        Raises ValueError or OSError with one sentence for whatever is missing or does not fit.
        """
        served = self.served
        proposes = self.target_drafter.split(":")[0] == "draft" or self.draft_drafter is not None
        needs_draft = needs_draft or self.draft is not None or (proposes and not served)
        options: dict[str, Any] = {"template_options": read_pairs(self.template_option, "--template-option")}
        if served:
            options |= self._server_options(needs_judge) | {"target_options": target_options, "expected": expected}
        else:
            check_dtype(self.dtype)
            options |= {
                "zero_shot": self.zero_shot,
                "target_drafter": None if self.target_drafter == NOBODY else self.target_drafter,
                "draft_drafter": self.draft_drafter,
                "device": check_device(self.device),
                "dtype": self.dtype,
                "trust_remote_code": self.trust_remote_code,
            }
        draft = self.draft_name if needs_draft else None
        adapter = self.adapter_name if needs_judge and not self.zero_shot else self.adapter

        from parse_infer.engine import ParseEngine

        _quiet()
        return ParseEngine.from_pretrained(
            self.target_name,
            draft,
            adapter,
            backend=self.backend,
            threshold=self.threshold,
            calibration=self.calibration,
            **options,
        )

    def _server_options(self, needs_judge: bool) -> dict[str, Any]:
        """Raises ValueError for options of the local backend."""
        for drafter, option in ((self.target_drafter, "--target-drafter"), (self.draft_drafter, "--draft-drafter")):
            if drafter not in (None, "auto", NOBODY):
                raise ValueError(f"{option} is for the local engine: give vLLM's server a speculative configuration")
        if self.device is not None or self.dtype != "auto":
            raise ValueError("--device and --dtype are for the local engine: servers have their own")
        if self.trust_remote_code:
            raise ValueError("--trust-remote-code is for the local engine: vLLM runs the models that it knows itself")
        return {
            "zero_shot": self.zero_shot or (not needs_judge and self.adapter is None),
            "target_url": self.target_url or (),
            "draft_url": self.draft_url or (),
            "local_draft": self.local_draft,
            "api_key": self.server_key,
            "tell": progress,
        }

    @property
    def train_problems(self) -> frozenset[str]:
        """Hashes of the prompts that the adapter was trained on, as far as it lists them."""
        files = self._adapter_files()
        return frozenset() if files is None else files.train_problems

    def _adapter_files(self) -> AdapterFiles | None:
        from parse_infer.judge.adapter_files import read_adapter
        from parse_infer.models.names import resolve

        adapter = None if self.zero_shot else self.adapter or PAIRS.get(self.target_name, (None, None))[1]
        return None if adapter is None else read_adapter(resolve(adapter))

    def describe_servers(self) -> dict[str, Any]:
        """What answers over vLLM, and where, as far as can be told before any server is there."""
        files = self._adapter_files()
        return {
            "target": self.target_name,
            "draft": self.draft or PAIRS.get(self.target_name, (None, None))[0],
            "adapter": None if files is None else self.adapter_name,
            "adapter_weights": None if files is None else files.fingerprint,
            "template_options": read_pairs(self.template_option, "--template-option"),
            "target_url": self.target_url,
            "draft_url": self.draft_url,
            "local_draft": self.local_draft,
        }

    @property
    def served(self) -> bool:
        """Whether servers answer. Raises ValueError for an unknown backend, and for addresses that nobody uses."""
        if self.backend not in ("local", "vllm"):
            raise ValueError(f"--backend is {self.backend!r}; choose local or vllm")
        if self.backend == "local" and (self.target_url or self.draft_url):
            raise ValueError("--target-url and --draft-url are for --backend vllm: give that too")
        if self.backend == "local" and self.local_draft is not None:
            raise ValueError("--local-draft and --draft-server are for --backend vllm: give that too")
        return self.backend == "vllm"


LOCAL_ONLY: dict[str, Any] = {
    "backend": "local",
    "target_url": None,
    "draft_url": None,
    "local_draft": None,
    "server_key": None,
}
"""For `with_models`, of commands that look into the models."""


def _quiet() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def progress(line: str) -> None:
    """On standard error; what is only for those who wait, on a terminal, where the next line takes its place."""
    if not line.startswith("starting"):
        print(line, file=sys.stderr, flush=True)
    elif sys.stderr.isatty():
        print(line, end="\r", file=sys.stderr, flush=True)


def of_pair(models: ModelOptions, pair: str) -> ModelOptions:
    """`models` with the embedded target called `pair` ("tiny" or "smollm2").

    Raises ValueError for another name, or a target that is given beside it.
    """
    if pair not in PAIR_NAMES:
        raise ValueError(f"unknown pair {pair!r}; {suggestion(pair, PAIR_NAMES)}")
    if models.target is not None:
        raise ValueError(f"--pair {pair} and --target {models.target} were both given: choose one")
    return replace(models, target=PAIR_NAMES[pair])


def with_models(**fixed: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turns a command's parameter `models: ModelOptions` into an option for each field that is not `fixed` for it."""
    hints = get_type_hints(ModelOptions, include_extras=True)
    offered = [f for f in fields(ModelOptions) if f.name not in fixed]

    def expand(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            chosen = {f.name: values.pop(f.name) for f in offered}
            command(**values, models=ModelOptions(**chosen, **fixed))

        signature, kind = inspect.signature(command, eval_str=True), inspect.Parameter.KEYWORD_ONLY
        parameters = [p.replace(kind=kind) for p in signature.parameters.values() if p.name != "models"]
        parameters += [inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name]) for f in offered]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return expand
