"""Answer one question: the draft model writes, and the target verifies every prefix in one forward pass.

python examples/generate.py "A boy has 6 stickers. His brother has 3 fewer. How many do they have together?"
"""

import argparse

from parse_infer import ParseEngine

QUESTION = "A boy has 6 stickers. His brother has 3 fewer. How many do they have together?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default=QUESTION)
    arguments = parser.parse_args()

    # Any Hugging Face id or folder works here. An adapter works only with its own target.
    engine = ParseEngine.from_pretrained(target="zoo:target", draft="zoo:draft", adapter="zoo:adapter")
    answer = engine.generate(arguments.question)
    print(answer.text)
    print()
    for span in answer.spans:  # the author of each span, and the judge's validity of the prefix
        validity = "" if span.validity is None else f"{span.validity:.2f}"
        print(f"{span.source:6} {validity:4} {span.text!r}")
    print(f"{answer.stats.accepted_tokens} of {answer.stats.draft_tokens} draft tokens were accepted")


if __name__ == "__main__":
    main()
