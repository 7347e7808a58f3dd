"""Weights & Biases: online with a key, offline without; never a prompt, and never the reason a training stops."""

from __future__ import annotations

import io
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlparse

from parse_train.training_config import TrainingConfig


def start(config: TrainingConfig) -> None:
    """Begin a run on the main process if the recipe reports to wandb; transformers' callback then uses it.

    What cannot work (no package, no network) is said once and taken out of `config.report_to`.
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
    for mode in modes:
        # Offline, wandb's own messages would only repeat the notice.
        settings = wandb.Settings(silent=mode != "online", init_timeout=30)
        try:
            wandb.init(
                project=config.project,
                name=config.run_name,
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
    """Send pictures (PNG) to the current run, if there is one."""
    run = _run()
    if run is None:
        return
    import wandb
    from PIL import Image

    images = {name: wandb.Image(Image.open(io.BytesIO(content))) for name, content in pictures.items()}
    run.log({**images, "train/global_step": step})


def finish(summary: Mapping[str, float]) -> None:
    """Put the final figures into the run's summary and end it."""
    run = _run()
    if run is not None:
        run.summary.update(dict(summary))
        run.finish()


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
