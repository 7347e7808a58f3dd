"""The end of a training: what the fresh adapter can promise about requests."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from data_tools.tasks.checkers import same_answer
from data_tools.tasks.registry import load_task
from parse_infer.calibration.measure import CalibrationSettings, calibrate
from parse_infer.calibration.schema import FILE, Calibration
from parse_infer.engine import ParseEngine
from parse_train import tracking
from parse_train.validity.build_info import BuildInfo
from parse_train.validity.config import ValidityTrainingConfig

CURVE = ("risk (upper bound)", "speed-up", "resume", "threshold", "lost")


def log(found: Calibration) -> None:
    """Add speed-up against risk, a point for each setting, and the promises to the tracker's run."""
    points = [
        (t.bound, t.speedup, t.setting.resume, t.setting.threshold, t.losses / found.n_problems) for t in found.tried
    ]
    tracking.log_curve("calibration", CURVE, points)
    kept = {risk: found.tried[place].speedup for risk, place in found.promises.items() if place is not None}
    tracking.summarise({f"promise/{risk:g}/speedup": speedup for risk, speedup in kept.items()})


def promise(config: ValidityTrainingConfig, build: BuildInfo) -> None:
    """Calibrate the pair that the data came from with the exported adapter, and write `calibration.json` beside it.

    Says why where there is nothing to promise; the training is finished all the same. The main process does it.
    """
    if not config.calibration_problems or config.process_index or not (build.task and build.draft.get("name")):
        return
    try:
        task = load_task(build.task, **build.task_options)
        n = config.calibration_problems
        problems = list(islice(task.problems("validation", limit=n), n))
        settings = CalibrationSettings(tuple(config.calibration_risks), max_new_tokens=build.max_draft_tokens)
        adapter = Path(str(config.adapter_dir))
        engine = ParseEngine.from_pretrained(
            config.target,
            build.draft["name"],
            adapter,
            device=config.device,
            dtype=config.target_dtype,
            template_options=config.template_options,
        )
        # A folder for each adapter: an interrupted calibration goes on, one of an earlier adapter is left alone.
        made = engine.describe()["adapter"]
        folder, where = f"{config.output_dir}/calibration-{made}", f"{build.task}, validation split, seed 0"
        found = calibrate(engine, problems, task.check, same_answer, folder, settings, task=where)
    except (ValueError, OSError) as error:
        print(f"no promise about requests: {error}")
        return
    found.save(adapter / FILE)
    log(found)
    for risk, place in found.promises.items():
        kept = "not shown" if place is None else f"{found.tried[place].speedup:.2f} times as fast"
        print(f"at most {risk:.2%} of requests lost, {found.confidence:.0%} confidence: {kept}")
