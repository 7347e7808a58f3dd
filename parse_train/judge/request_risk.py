"""Calibration of a new adapter at the end of a training, with a risk bound per request."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path

from data_tools.tasks.checkers import same_answer
from data_tools.tasks.registry import load_task
from data_tools.tasks.task import comparison
from parse_infer import tracking
from parse_infer.calibration.calibration_file import FILE, add_calibration
from parse_infer.calibration.measure import calibrate
from parse_infer.calibration.schema import Calibration, Loss
from parse_infer.calibration.settings import CalibrationSettings
from parse_infer.engine import ParseEngine
from parse_train.judge.build_info import BuildInfo
from parse_train.judge.config import JudgeTrainingConfig

CURVE = ("lost", "speed-up", "block tokens", "threshold", "lost (upper bound)")


def log(calibration: Calibration) -> None:
    """Log the speed-up over the share of lost requests, one point per setting, and the promises to the tracker."""
    points = [
        (t.losses / calibration.n_problems, t.speedup, str(t.setting.block_tokens), t.setting.threshold, t.bound)
        for t in calibration.tried
    ]
    tracking.log_curve("calibration", CURVE, points)
    kept = {
        risk: calibration.tried[place].speedup for risk, place in calibration.promises.items() if place is not None
    }
    tracking.summarise({f"promise/{risk:g}/speedup": speedup for risk, speedup in kept.items()})


def calibrate_requests(config: JudgeTrainingConfig, build: BuildInfo) -> None:
    """Calibrate the exported adapter with the two models of the data, and add `calibration.json` to its folder.

    The loss is "disagreement" for data that was labelled with the target's own answers.

    Runs on the main process only. A failure prints its reason and does not fail the training.
    """
    if not config.calibration_problems or config.process_index or not (build.task and build.draft.get("name")):
        return
    try:
        task = load_task(build.task, **build.task_options)
        n = config.calibration_problems
        problems = list(islice(task.problems("validation", limit=n), n))
        # Labels from the target's own answers have no references, so a request is lost where the answers differ.
        loss: Loss = "disagreement" if build.label.get("check_with") == "own_answer" else "lost"
        settings = CalibrationSettings(
            tuple(config.calibration_risks), loss=loss, max_new_tokens=build.max_draft_tokens
        )
        adapter = Path(str(config.adapter_dir))
        engine = ParseEngine.from_pretrained(
            getattr(config, "target", None) or build.target["name"],
            build.draft["name"],
            adapter,
            device=config.device,
            dtype=getattr(config, "target_dtype", "auto"),
            template_options=config.template_options,
        )
        # One folder per adapter: an interrupted calibration resumes, and calibrations of earlier adapters are kept.
        adapter_id = engine.describe()["adapter"]
        folder, where = f"{config.output_dir}/calibration-{adapter_id}", f"{build.task}, validation split, seed 0"
        compare = partial(comparison, task)
        calibration = calibrate(
            engine, problems, task.check, same_answer, folder, settings, task=where, comparison=compare
        )
    except (ValueError, OSError, RuntimeError, ImportError) as error:  # RuntimeError: out of memory
        print(f"the adapter is not calibrated: {error}")
        return
    add_calibration(adapter / FILE, calibration)
    log(calibration)
    for risk, place in calibration.promises.items():
        kept = "not reached" if place is None else f"{calibration.tried[place].speedup:.2f} times as fast"
        print(f"at most {risk:.2%} of requests lost, {calibration.confidence:.0%} confidence: {kept}")
