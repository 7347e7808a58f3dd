"""Score the validity of each step of a text from any source: another model, a cache or a person.

python examples/score.py
"""

from parse_infer import ParseEngine

PROMPT = "A boy has 6 stickers. His brother has 3 fewer. How many do they have together?"
RIGHT = "His brother has 6 - 3 = 3 stickers.\nTogether, they have 6 + 3 = 9 stickers.\n#### 9"
WRONG = "His brother has 6 - 3 = 4 stickers.\nTogether, they have 6 + 4 = 10 stickers.\n#### 10"


def main() -> None:
    engine = ParseEngine.from_pretrained(target="zoo:target", adapter="zoo:adapter")  # scoring needs no draft model
    for response in (RIGHT, WRONG):
        score = engine.score(PROMPT, response)  # one forward of the target for all steps
        for segment in score.segments:
            print(f"{segment.validity:.2f}  {segment.text.rstrip()}")
        error = score.first_error
        print("every step is valid" if error is None else f"the first error is in step {error + 1}", end="\n\n")


if __name__ == "__main__":
    main()
