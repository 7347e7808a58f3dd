"""Weights & Biases: online with a key, offline without; never a prompt, and never the reason a training stops.

A training is one run, however often it is interrupted. Files are sent only where `artifacts: upload` asks for it.
"""

from __future__ import annotations

import io
import netrc
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from parse_train.training_config import TrackedTrainingConfig, TrainingConfig

RUN_ID = "wandb_run_id"  # file in output_dir


def start(config: TrackedTrainingConfig, resumed: bool = False) -> None:
    """Begin a run on the main process if the recipe reports to wandb; transformers' callback then uses it.

    What cannot work (no package, no network) is said once and taken out of `config.report_to`.

    Args:
        resumed: the training continues from a checkpoint, and so does its run.
    """
    if "wandb" not in _trackers(config):
        return
    try:
        import wandb
    except ImportError:
        _give_up(config, "wandb is not installed (pip install wandb)")
        return
    if config.process_index != 0:
        return
    folder = Path(str(config.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    wanted = os.environ.get("WANDB_MODE", "online")
    modes = [wanted] if wanted in ("disabled", "offline") else ["online", "offline"]
    if modes[0] == "online" and not has_key():
        modes = ["offline"]
        print(f"wandb has no API key: logging offline to {folder}/wandb (`wandb login` sends runs to the server)")
    id = _run_id(folder, resumed)
    for mode in modes:
        # Offline, wandb's own messages would only repeat the notice.
        settings = wandb.Settings(silent=mode != "online", init_timeout=30)
        try:
            wandb.init(
                project=config.project,
                name=config.run_name,
                id=id,
                resume="allow",
                dir=folder,
                mode=mode,  # type: ignore[arg-type]  # one of wandb's words, or the user's own mistake
                settings=settings,
            )
            return
        except Exception as error:  # a tracker must never stop a training
            print(f"wandb could not start {mode}: {error}")
    _give_up(config, "wandb could not start")


def has_key() -> bool:
    """Whether wandb would find an API key without asking: in WANDB_API_KEY, or where `wandb login` puts it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    file = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def runs() -> bool:
    """Whether this process has a run that is going on."""
    return _run() is not None


def log_images(pictures: Mapping[str, bytes], step: int) -> None:
    """Add pictures (PNG) to the current run, if there is one."""
    with _current_run("figures") as run:
        if run is None:
            return
        import wandb
        from PIL import Image

        images = {name: wandb.Image(Image.open(io.BytesIO(content))) for name, content in pictures.items()}
        run.log({**images, "train/global_step": step})


def log_curve(name: str, columns: tuple[str, str, str, *tuple[str, ...]], rows: Sequence[tuple[Any, ...]]) -> None:
    """Add a table to the current run, and a chart of its second column over its first, a line for each value of the
    third."""
    with _current_run(name) as run:
        if run is None:
            return
        import wandb

        x, y, line = columns[:3]
        table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        chart = wandb.plot.line(table, x, y, stroke=line, title=f"{y} against {x}")
        run.log({f"{name}/table": table, f"{name}/chart": chart})


def log_artifact(
    config: TrackedTrainingConfig,
    kind: Literal["dataset", "model"],
    name: str,
    source: str | Path,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Add what was learnt from, or what came of it, to the current run; see `TrackedTrainingConfig.artifacts`.

    Args:
        source: a file, a folder (hidden files are left out), or the Hub id of a data set, always a reference.
    """
    with _current_run(f"the artifact {name}") as run:
        if run is None or config.artifacts == "none":
            return
        import wandb

        artifact = wandb.Artifact(re.sub(r"[^\w.-]+", "-", name), kind, metadata=dict(metadata or {}))
        path = Path(source).absolute()
        if kind == "dataset" and not path.exists():
            artifact.add_reference(f"https://huggingface.co/datasets/{source}", name="data", checksum=False)
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            inside = file.relative_to(path) if path.is_dir() else Path(file.name)
            if file.is_file() and not any(part.startswith(".") for part in inside.parts):
                if config.artifacts == "upload":
                    artifact.add_file(str(file), name=str(inside))
                else:
                    artifact.add_reference(f"file://{file}", name=str(inside))
        # Offline wandb knows no inputs of a run.
        log = run.use_artifact if kind == "dataset" and not run.offline else run.log_artifact
        log(artifact)


def summarise(figures: Mapping[str, float]) -> None:
    """Put final figures into the summary of the current run."""
    with _current_run("the summary") as run:
        if run is not None:
            run.summary.update(dict(figures))


def finish() -> None:
    """End the current run."""
    with _current_run("the end of the run") as run:
        if run is not None:
            run.finish()


@contextmanager
def _current_run(what: str) -> Iterator[Any]:
    """The run of this process, or None. What goes wrong with it is said, and the training goes on."""
    try:
        yield _run()
    except Exception as error:
        print(f"wandb could not log {what}: {error}")


def _run_id(folder: Path, resumed: bool) -> str | None:
    """The id kept in `folder`; a new one unless a training is `resumed`. None: wandb takes the user's own."""
    if os.environ.get("WANDB_RUN_ID"):
        return None
    kept = folder / RUN_ID
    if not (resumed and kept.is_file()):
        kept.write_text(secrets.token_hex(4))
    return kept.read_text()


def _trackers(config: TrainingConfig) -> list[str]:
    return config.report_to if isinstance(config.report_to, list) else []


def _run():  # type: ignore[no-untyped-def]  # wandb.Run, where wandb is installed and running
    try:
        import wandb
    except ImportError:
        return None
    return wandb.run


def _give_up(config: TrainingConfig, reason: str) -> None:
    config.report_to = [name for name in _trackers(config) if name != "wandb"]
    if config.process_index == 0:
        print(f"{reason}: metrics go to the log only")
