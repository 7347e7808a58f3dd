"""Model options that commands share: one dataclass whose fields become command-line options."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from parse_infer.cli.expand import KIND, Command, expand_parameter
from parse_infer.cli.options import Device, Dtype, TorchCompile, check_device, check_dtype, given, read_pairs
from parse_infer.cli.setting_options import option_of
from parse_infer.errors import ParseError
from parse_infer.suggest import suggestion
from parse_infer.text.cuts import CUT_RULES

if TYPE_CHECKING:
    from parse_infer.engine import ParseEngine
    from parse_infer.judge.adapter_files import AdapterFiles
    from parse_infer.settings.generation import GenerationSettings

NO_DRAFTER = "none"
# Draft model and adapter of each embedded target.
PAIRS = {"zoo:target": ("zoo:draft", "zoo:adapter"), "zoo:smollm2": ("zoo:smollm2-draft", "zoo:smollm2-adapter")}
PAIR_NAMES = {"tiny": "zoo:target", "smollm2": "zoo:smollm2"}


@dataclass(frozen=True)
class ModelOptions:
    """Models of a command and how they are loaded. Defaults exist only for the embedded targets."""

    threshold: Annotated[float | None, option_of("threshold")] = None
    target: Annotated[
        str | None,
        typer.Option(help="Hugging Face id, folder, GGUF file, smollm2, zoo:target (the default) or zoo:smollm2."),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(help="Draft model, or its name on a server of --draft-url; default: the embedded target's own."),
    ] = None
    adapter: Annotated[str | None, typer.Option(help="Trained adapter; default: the embedded target's own.")] = None
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE]",
            help="Instead of an adapter: min_p keeps draft tokens at least 0.1 times as likely as the target's first "
            "choice (or min_p:ratio=0.3), zero_shot asks the target; also relaxed_acceptance, accept_threshold, "
            "typical_acceptance, fly. With --adapter: a floor below its judge, such as min_p:ratio=0.01. Without "
            "adapter and judge: lossless speculation.",
        ),
    ] = None
    calibration: Annotated[
        str | None, typer.Option(help="calibration.json for --risk; default: the file in the adapter's folder.")
    ] = None
    cut_policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Where to cut drafts: {', '.join(CUT_RULES)}; a distance follows the name, as in tokens:4. Default: "
            "the adapter's.",
        ),
    ] = None
    target_drafter: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Token-level drafter for the text that the target writes; keeps greedy answers (in float32). auto: "
            "the draft model, if it has the target's tokens. Also none, lookup, draft, or the folder of an EAGLE-3, "
            "P-EAGLE or Medusa head. Sizes follow the name, as in draft:tokens=4.",
        ),
    ] = "auto"
    backend: Annotated[
        str,
        typer.Option(metavar="local|vllm", help="vllm: servers and concurrent requests (docs/guide/servers.md)."),
    ] = "local"
    target_url: Annotated[
        list[str] | None,
        typer.Option(
            help="Target server (vLLM, SGLang) for --backend vllm; repeatable. dns+http://NAME:PORT or file:PATH: "
            "servers that come and go. Default: start one, except for `serve`."
        ),
    ] = None
    draft_url: Annotated[
        list[str] | None,
        typer.Option(
            help="Draft server for --backend vllm: any with OpenAI's API; repeatable. Default: as for --target-url."
        ),
    ] = None
    local_draft: Annotated[
        bool | None,
        typer.Option(
            "--local-draft/--draft-server",
            help="With --backend vllm: run the draft model in this process or on a server. Default: in this process "
            "if it is small (32 MiB) and there is no GPU.",
        ),
    ] = None
    parallel: Annotated[
        int | None, typer.Option(min=1, help="With --backend vllm: answers at the same time; default: 64.")
    ] = None
    server_key: Annotated[
        str | None, typer.Option(envvar="VLLM_API_KEY", help="API key of the target's servers; default: none.")
    ] = None
    draft_key: Annotated[
        str | None,
        typer.Option(
            envvar="PARSE_DRAFT_API_KEY",
            help="API key of the draft servers; default: none, or --server-key at a target server's own address.",
        ),
    ] = None
    device: Device = None
    dtype: Dtype = "auto"
    draft_dtype: Annotated[
        str | None, typer.Option(help="As --dtype, or int8 on a CPU, half of bfloat16's memory; default: --dtype.")
    ] = None
    torch_compile: TorchCompile = False
    template_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Chat template variable, for example enable_thinking=false; repeatable."
        ),
    ] = None
    thinking_marks: Annotated[
        str | None,
        typer.Option(
            metavar="'START END'|none",
            help="Tokens around the target's thinking; none: it does not think. Default: '<think> </think>', if the "
            "target has these tokens.",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code in a model's repository.")
    ] = False

    @property
    def target_name(self) -> str:
        return self.target or "zoo:target"

    @property
    def draft_name(self) -> str | None:
        """None: the draft server knows its model. Raises ValueError without a given or embedded draft model."""
        if self.draft is None and self.target_name not in PAIRS:
            if self.draft_url:
                return None
            raise ParseError(f"the target {self.target!r} needs a draft model of its own: give one with --draft")
        return self.draft or PAIRS[self.target_name][0]

    @property
    def adapter_name(self) -> str | None:
        """None: another judge was chosen, or the target has no embedded adapter."""
        if self.judge is not None:
            return self.adapter
        return self.adapter or PAIRS.get(self.target_name, (None, None))[1]

    def load(
        self,
        *,
        needs_draft: bool = True,
        needs_judge: bool = True,
        target_options: dict[str, Any] | None = None,
        expected: GenerationSettings | None = None,
        promised: bool = False,
        start_servers: bool = True,
    ) -> ParseEngine:
        """Load the named or needed models.

        Args:
            start_servers: with --backend vllm start a server for each model without address; False: refuse.
            target_options: extra vLLM options for a target server that this starts.
            expected: settings of the future requests.
            promised: `with_promise` gave the settings, so the calibrations must fit the models.

        Raises ValueError or OSError, with a one-sentence message, for missing or mismatched parts.
        """
        from parse_infer.models.names import resolve

        served = self.served
        resolve(self.target_name)  # a misspelt name gets its own sentence, not one about its draft model
        proposes = self.target_drafter.split(":")[0] == "draft"
        needs_draft = needs_draft or self.draft is not None or (proposes and not served)
        options: dict[str, Any] = {
            "judge": self.judge,
            "template_options": read_pairs(self.template_option, "--template-option"),
            "thinking_marks": self.thinking_marks,
        }
        if served:
            options |= self._server_options() | {
                "target_options": target_options,
                "expected": expected,
                "start_servers": start_servers,
            }
            options |= {} if needs_draft else {"draft_url": ()}
        else:
            check_dtype(self.dtype)
            check_dtype(self.draft_dtype or self.dtype, "int8")
            options |= {
                "target_drafter": None if self.target_drafter == NO_DRAFTER else self.target_drafter,
                "device": check_device(self.device),
                "dtype": self.dtype,
                "draft_dtype": self.draft_dtype,
                "torch_compile": self.torch_compile,
                "trust_remote_code": self.trust_remote_code,
            }
        draft = self.draft_name if needs_draft else None
        adapter = self.adapter_name if needs_judge else self.adapter
        unjudged = not needs_judge and adapter is None and self.judge is None  # then a threshold decides nothing

        from parse_infer.engine import ParseEngine

        _quiet()
        engine = ParseEngine.from_pretrained(
            self.target_name,
            draft,
            adapter,
            backend=self.backend,
            threshold=None if unjudged else self.threshold,
            calibration=self.calibration,
            cut_policy=self.cut_policy,
            **options,
        )
        if promised:
            engine.check_calibrations()
        return engine

    def with_promise(self, settings: GenerationSettings, risk: float | None) -> GenerationSettings:
        """`settings` with those of the promise `risk`; unchanged if it is None.

        Raises ValueError without this promise, and for settings that it does not cover.
        """
        if risk is None:
            return settings
        from parse_infer.calibration.calibration_file import find_calibrations
        from parse_infer.calibration.promises import resolve_risk
        from parse_infer.models.names import resolve

        shipped = None if self.adapter_name is None or self.judge is not None else resolve(self.adapter_name)
        known = find_calibrations(self.calibration, shipped, self.backend)
        return resolve_risk(settings.override(risk=risk), known).override(risk=None, strict_tokens=0, adaptive=False)

    def _server_options(self) -> dict[str, Any]:
        """Fields of `ServerOptions`. Raises ValueError for options of the local backend."""
        if self.target_drafter not in ("auto", NO_DRAFTER):
            raise ParseError("--target-drafter needs --backend local: configure speculative_config on the vLLM server")
        if self.device is not None or self.dtype != "auto" or self.draft_dtype is not None:
            raise ParseError("--device, --dtype and --draft-dtype need --backend local: servers choose their own")
        if self.torch_compile:
            raise ParseError("--torch-compile needs --backend local: vLLM compiles automatically")
        if self.trust_remote_code:
            raise ParseError("--trust-remote-code needs --backend local: vLLM has its own model implementations")
        return {
            "target_url": self.target_url or (),
            "draft_url": self.draft_url or (),
            "local_draft": self.local_draft,
            "api_key": self.server_key,
            "draft_api_key": self.draft_key,
            "on_progress": progress,
            **given(parallel=self.parallel),
        }

    @property
    def train_problems(self) -> frozenset[str]:
        """Hashes of the training prompts of adapter and models, as far as their folders list them."""
        from parse_infer.models.train_problems import train_problems_of

        files = self._adapter_files()
        known = train_problems_of(self.target_name, None if self.draft_url else self.draft_name)
        return known if files is None else known | files.train_problems

    def _adapter_files(self) -> AdapterFiles | None:
        from parse_infer.judge.adapter_files import read_adapter
        from parse_infer.models.names import resolve

        return None if self.adapter_name is None else read_adapter(resolve(self.adapter_name))

    def describe_servers(self) -> dict[str, Any]:
        """Models and addresses of --backend vllm, as known before any server runs."""
        files = self._adapter_files()
        return {
            "target": self.target_name,
            "draft": self.draft or PAIRS.get(self.target_name, (None, None))[0],
            "adapter": self.adapter_name,
            "adapter_weights": None if files is None else files.fingerprint,
            "threshold": None if files is None else files.validity_config.get("threshold"),
            "template_options": read_pairs(self.template_option, "--template-option"),
            "target_url": self.target_url,
            "draft_url": self.draft_url,
            "local_draft": self.local_draft,
            **given(cut_policy=self.cut_policy, judge=self.judge),
        }

    @property
    def served(self) -> bool:
        """Whether the backend is vllm. Raises ValueError for an unknown backend or for unused server options."""
        if self.backend not in ("local", "vllm"):
            raise ParseError(f"--backend is {self.backend!r}; choose local or vllm")
        if self.backend == "local" and (self.target_url or self.draft_url):
            raise ParseError("--target-url and --draft-url need --backend vllm")
        if self.backend == "local" and self.local_draft is not None:
            raise ParseError("--local-draft and --draft-server need --backend vllm")
        if self.backend == "local" and self.parallel is not None:
            raise ParseError("--parallel needs --backend vllm: the local backend answers one request at a time")
        return self.backend == "vllm"


LOCAL_ONLY: dict[str, Any] = {
    "backend": "local",
    "target_url": None,
    "draft_url": None,
    "local_draft": None,
    "parallel": None,
    "server_key": None,
    "draft_key": None,
}
"""Fixed options (see `with_models`) of commands that need the local backend."""


def _quiet() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def progress(line: str) -> None:
    """Print a line on standard error; "starting …" lines only on a terminal, where the next line overwrites them."""
    if not line.startswith("starting"):
        print(line, file=sys.stderr, flush=True)
    elif sys.stderr.isatty():
        print(line, end="\r", file=sys.stderr, flush=True)


def of_pair(models: ModelOptions, pair: str) -> ModelOptions:
    """Replace the target by the embedded target of `pair` ("tiny" or "smollm2").

    Raises ValueError for another name, or if `models` names a target too.
    """
    if pair not in PAIR_NAMES:
        raise ParseError(f"unknown pair {pair!r}; {suggestion(pair, PAIR_NAMES)}")
    if models.target is not None:
        raise ParseError(f"--pair {pair} and --target {models.target} were both given: choose one")
    return replace(models, target=PAIR_NAMES[pair])


def with_models(**fixed: Any) -> Callable[[Command], Command]:
    """Replace a command's parameter `models: ModelOptions` by one option per field that is not in `fixed`."""
    hints = get_type_hints(ModelOptions, include_extras=True)
    offered = [
        inspect.Parameter(f.name, KIND, default=f.default, annotation=hints[f.name])
        for f in fields(ModelOptions)
        if f.name not in fixed
    ]
    return expand_parameter("models", offered, functools.partial(ModelOptions, **fixed))
