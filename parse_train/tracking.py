"""Weights & Biases logging: online with an API key, offline without. wandb never prompts and never stops a training.

A training is one run, even after interruptions. Only `artifacts: upload` uploads files.
"""

from __future__ import annotations

import io
import netrc
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from parse_train.training_config import TrackedTrainingConfig, TrainingConfig

RUN_ID = "wandb_run_id"  # file in output_dir


def start(config: TrackedTrainingConfig, resumed: bool = False) -> None:
    """Start a run on the main process if the recipe reports to wandb; transformers' callback uses this run.

    Without the package or the network, print the reason once and remove wandb from `config.report_to`.

    Args:
        resumed: whether the training resumes from a checkpoint; the run is then resumed too.
    """
    if "wandb" not in _trackers(config):
        return
    try:
        import wandb
    except ImportError:
        _disable(config, "wandb is not installed (pip install wandb)")
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
        # Offline, wandb's own messages would repeat the notice.
        settings = wandb.Settings(silent=mode != "online", init_timeout=30)
        try:
            wandb.init(
                project=config.project,
                name=config.run_name,
                id=id,
                resume="allow",
                dir=folder,
                mode=mode,  # type: ignore[arg-type]  # wandb checks the user's value
                settings=settings,
            )
            return
        except Exception as error:  # a tracker must not stop a training
            print(f"wandb could not start {mode}: {error}")
    _disable(config, "wandb could not start")


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

    def log(run: Any) -> None:
        import wandb
        from PIL import Image

        images = {name: wandb.Image(Image.open(io.BytesIO(content))) for name, content in pictures.items()}
        run.log({**images, "train/global_step": step})

    _to_run("figures", log)


def log_curve(name: str, columns: tuple[str, str, str, *tuple[str, ...]], rows: Sequence[tuple[Any, ...]]) -> None:
    """Log a table to the current run, with a chart of column 2 over column 1 and a line per value of column 3."""

    def log(run: Any) -> None:
        import wandb

        x, y, line = columns[:3]
        table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        chart = wandb.plot.line(table, x, y, stroke=line, title=f"{y} against {x}")
        run.log({f"{name}/table": table, f"{name}/chart": chart})

    _to_run(name, log)


def log_artifact(
    config: TrackedTrainingConfig,
    kind: Literal["dataset", "model"],
    name: str,
    source: str | Path,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Log a data set or a trained model to the current run; see `TrackedTrainingConfig.artifacts`.

    Args:
        source: a file, a folder (without hidden files), or the Hub id of a data set, which is always a reference.
    """

    def log(run: Any) -> None:
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
        # Offline wandb cannot record inputs of a run.
        (run.use_artifact if kind == "dataset" and not run.offline else run.log_artifact)(artifact)

    if config.artifacts != "none":
        _to_run(f"the artifact {name}", log)


def summarise(figures: Mapping[str, float]) -> None:
    """Add final figures to the summary of the current run."""
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


def _trackers(config: TrainingConfig) -> list[str]:
    return config.report_to if isinstance(config.report_to, list) else []


def _run():  # type: ignore[no-untyped-def]  # wandb.Run or None
    try:
        import wandb
    except ImportError:
        return None
    return wandb.run


def _disable(config: TrainingConfig, reason: str) -> None:
    config.report_to = [name for name in _trackers(config) if name != "wandb"]
    if config.process_index == 0:
        print(f"{reason}: metrics are only printed to the log")
