"""Weights & Biases runs of trainings, builds and benchmarks: online with an API key, offline without.

wandb never prompts and never stops the work. Only `artifacts: upload` uploads files.
"""

from __future__ import annotations

import hashlib
import io
import netrc
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlparse

if TYPE_CHECKING:
    from wandb import Run

RUN_ID = "wandb_run_id"  # file in the run's folder
TRACKERS = ["none", "wandb"]
_LONGEST_NAME = 128  # of an artifact, in wandb
_LONGEST_PAIR = 90  # of the names in it


@dataclass(frozen=True)
class RunOptions:
    """What identifies a run.

    Attributes:
        folder: the run's files and its id.
        job: what runs: "train", "build" or "bench".
        kind: kind of recipe, or of the job.
        models: names of target and draft model, as far as they are known; runs of one pair are a group.
        config: settings that the run shows.
    """

    folder: Path
    job: Literal["train", "build", "bench"]
    kind: str
    models: tuple[str, ...]
    project: str = "parse"
    name: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pair(self) -> str:
        """The models' short names and a hash of the whole ones, which distinguishes pairs that look alike.

        The group of the run, and the beginning of its artifacts' names."""
        words = "-".join(filter(None, map(short_name, self.models)))[:_LONGEST_PAIR]
        whole = hashlib.sha256("\n".join(self.models).encode()).hexdigest()[:6]
        return f"{words}-{whole}".lstrip("-")

    @property
    def tags(self) -> list[str]:
        """The kind and the models' short names, each once."""
        return list(dict.fromkeys(filter(None, [self.kind, *(short_name(model)[:64] for model in self.models)])))


def short_name(model: str) -> str:
    """Return a model's id, or the last two folders of its path, in letters that an artifact's name may have."""
    return _in_name("-".join(Path(model).parts[-2:])).strip("-")


def _in_name(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_.-]+", "-", text)


def start(options: RunOptions, resumed: bool = False) -> str | None:
    """Start a run; transformers' callback uses it. Return the reason if wandb is not installed or cannot start.

    Args:
        resumed: whether earlier work continues; the run then continues too.
    """
    try:
        import wandb
    except ImportError:
        return "wandb is not installed (pip install wandb)"
    options.folder.mkdir(parents=True, exist_ok=True)
    requested = os.environ.get("WANDB_MODE", "online")
    modes = [requested] if requested in ("disabled", "offline") else ["online", "offline"]
    if modes[0] == "online" and not has_key():
        modes = ["offline"]
        print(
            f"wandb has no API key: logging offline to {options.folder}/wandb (`wandb login` sends runs to the server)"
        )
    id = _run_id(options.folder, resumed)
    for mode in modes:
        # Offline, wandb's own messages would repeat the notice.
        settings = wandb.Settings(silent=mode != "online", init_timeout=30)
        try:
            wandb.init(
                project=options.project,
                name=options.name,
                job_type=options.job,
                group=options.pair,
                tags=options.tags,
                config={**options.config, "kind": options.kind, "models": list(options.models)},
                id=id,
                resume="allow",
                dir=options.folder,
                mode=mode,  # type: ignore[arg-type]  # wandb checks the user's value
                settings=settings,
            )
            return None
        except Exception as error:  # a tracker must not stop the work
            print(f"wandb could not start {mode}: {error}")
    return "wandb could not start"


@contextmanager
def job(options: RunOptions | None) -> Iterator[None]:
    """Log within the `with` block to one run for finished work; None: log nothing. Print why a run cannot start."""
    if options is None:
        yield
        return
    if reason := start(options, resumed=True):
        print(f"{reason}: the {options.job} is not tracked")
    try:
        yield
    finally:
        finish()


def installed() -> bool:
    """Whether wandb can be imported."""
    try:
        import wandb  # noqa: F401
    except ImportError:
        return False
    return True


def has_key() -> bool:
    """Whether wandb finds an API key without a prompt: in WANDB_API_KEY, or in the file of `wandb login`."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    file = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def runs() -> bool:
    """Whether this process has an active run."""
    return _run() is not None


def log_images(pictures: Mapping[str, bytes], step: int) -> None:
    """Log PNG images to the current run, if any."""

    def log(run: Run) -> None:
        import wandb
        from PIL import Image

        images = {name: wandb.Image(Image.open(io.BytesIO(content))) for name, content in pictures.items()}
        run.log({**images, "train/global_step": step})

    _to_run("figures", log)


def log_curve(name: str, columns: tuple[str, str, str, *tuple[str, ...]], rows: Sequence[tuple[Any, ...]]) -> None:
    """Log a chart of column 2 over column 1, with a line per value of column 3, and its table `{name}_table`."""

    def log(run: Run) -> None:
        import wandb

        x, y, line = columns[:3]
        table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        run.log({name: wandb.plot.line(table, x, y, stroke=line, title=f"{y} against {x}")})

    _to_run(name, log)


def log_table(name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Log a table to the current run."""

    def log(run: Run) -> None:
        import wandb

        run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    _to_run(name, log)


def log_page(name: str, html: str) -> None:
    """Log a page of HTML to the current run."""

    def log(run: Run) -> None:
        import wandb

        run.log({name: wandb.Html(html, inject=False)})

    _to_run(name, log)


def log_artifact(
    how: str,
    kind: Literal["dataset", "model"],
    name: str,
    source: str | Path,
    metadata: Mapping[str, Any] | None = None,
    used: bool = False,
) -> None:
    """Log a data set or a model to the current run.

    Args:
        how: "reference" (paths and hashes), "upload" (also files) or "none".
        used: it is an input of the run. Under the name and with the content that its own run logged, it links both.
        name: contains the names of the models, since one project holds the artifacts of many pairs.
        source: a file, a folder (without hidden files and wandb's own), or a Hub id, which is always a reference.
    """

    def log(run: Run) -> None:
        import wandb

        artifact = wandb.Artifact(_in_name(name)[:_LONGEST_NAME], kind, metadata=dict(metadata or {}))
        path = Path(source).absolute()
        if not path.exists():
            where = f"datasets/{source}" if kind == "dataset" else source
            artifact.add_reference(f"https://huggingface.co/{where}", name="data", checksum=False)
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            inside = file.relative_to(path) if path.is_dir() else Path(file.name)
            if file.is_file() and not any(part.startswith(".") or part == "wandb" for part in inside.parts):
                if how == "upload":
                    artifact.add_file(str(file), name=str(inside))
                else:
                    artifact.add_reference(f"file://{file}", name=str(inside))
        # Offline wandb cannot record inputs of a run.
        (run.use_artifact if used and not run.offline else run.log_artifact)(artifact)

    if how != "none":
        _to_run(f"the artifact {name}", log)


def note(settings: Mapping[str, Any]) -> None:
    """Add settings to the configuration of the current run."""
    _to_run("the configuration", lambda run: run.config.update(dict(settings), allow_val_change=True))


def summarise(figures: Mapping[str, Any]) -> None:
    """Add final figures to the summary of the current run; a figure of the same name is replaced."""
    _to_run("the summary", lambda run: run.summary.update(dict(figures)))


def finish() -> None:
    """End the current run."""
    _to_run("the end of the run", lambda run: run.finish())


def _to_run(what: str, log: Callable[[Any], None]) -> None:
    """Call `log` with the run of this process, if any; print errors of wandb instead of raising them."""
    try:
        if (run := _run()) is not None:
            log(run)
    except Exception as error:
        print(f"wandb could not log {what}: {error}")


def _run_id(folder: Path, resumed: bool) -> str | None:
    """Return the run id stored in `folder`, or a new id unless `resumed`; None where the user sets WANDB_RUN_ID."""
    if os.environ.get("WANDB_RUN_ID"):
        return None
    kept = folder / RUN_ID
    if not (resumed and kept.is_file()):
        kept.write_text(secrets.token_hex(4))
    return kept.read_text()


def _run():  # type: ignore[no-untyped-def]  # wandb.Run or None
    try:
        import wandb
    except ImportError:
        return None
    return wandb.run
