"""Train a validity head for the embedded pair: build labelled drafts, train, and print the command to use it.

python examples/train.py --problems my_problems.jsonl     # rows like {"prompt": "…", "reference": "42"}

Without --problems, the example generates a few problems. A useful head needs some thousand problems.
"""

import argparse
import json
from pathlib import Path

from data_tools.cli import main as parse_data
from parse_train.__main__ import main as parse_train
from parse_zoo.tasks.gsm_symbolic import GsmSymbolic

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=Path, help="jsonl file with prompt and reference (checked as a number)")
    parser.add_argument("--limit", default="32", help="number of problems")
    parser.add_argument("--out", type=Path, default=Path("runs/example"))
    arguments, training = parser.parse_known_args()  # e.g. --max_steps 100 goes to the training
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.problems is None:
        arguments.problems = arguments.out / "problems.jsonl"
        problems = GsmSymbolic().problems("train", seed=9, limit=int(arguments.limit))
        rows = [json.dumps({"prompt": p.prompt, "reference": p.reference}) for p in problems]
        arguments.problems.write_text("\n".join(rows) + "\n")

    task = [
        "--task",
        "jsonl",
        "--task_options",
        json.dumps({"path": str(arguments.problems)}),
        "--limit",
        arguments.limit,
    ]
    data, run = str(arguments.out / "data"), str(arguments.out / "judge")
    # The draft model answers, the target continues from prefixes: parse-data build recipes/data.yaml …
    code = parse_data(["build", str(RECIPES / "data.yaml"), "--output_dir", data, *task])
    # On several GPUs: accelerate launch recipes/train.yaml --data … --output_dir …
    options = ["--data", data, "--output_dir", run, "--report_to", "none", "--calibration_problems", "0", *training]
    first = ["--start_from", str(RECIPES / "train-logprob.yaml")]
    code = code or parse_train([str(RECIPES / "train.yaml"), *first, *options])
    if code == 0:
        print(f"Use it: parse-infer generate --adapter {run}/adapter …")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
