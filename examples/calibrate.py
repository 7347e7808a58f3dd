"""Find the fastest settings that bound the share of lost answers, then answer with these settings.

python examples/calibrate.py --limit 60
"""

import argparse

from data_tools.tasks.checkers import same_answer
from parse_infer import ParseEngine
from parse_infer.calibration.measure import calibrate
from parse_infer.calibration.settings import CalibrationSettings
from parse_zoo.tasks.gsm_symbolic import GsmSymbolic

RISK = 0.5  # high, so that few problems suffice: 0.05 needs 59, 0.01 needs 299


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=60, help="number of problems")
    parser.add_argument("--out", default="runs/example-calibration")
    arguments = parser.parse_args()

    engine = ParseEngine.from_pretrained(target="zoo:target", draft="zoo:draft", adapter="zoo:adapter")
    task = GsmSymbolic()
    problems = list(task.problems("validation", limit=arguments.limit))
    settings = CalibrationSettings(risks=(RISK,), timed=10)
    found = calibrate(engine, problems, task.check, same_answer, arguments.out, settings, task=task.name)
    engine.calibrations = (found,)

    answer = engine.generate(
        "A boy has 6 stickers. His brother has 3 fewer. How many do they have together?", risk=RISK
    )
    print(answer.text)


if __name__ == "__main__":
    main()
