"""Stream the events of an answer: drafts, verifications, accepted text and the target's own tokens.

python examples/stream.py
"""

from parse_infer import ParseEngine
from parse_infer.request.events import Accepted, Done, Drafted, Resumed, Verified

QUESTION = "A boy has 6 stickers. His brother has 3 fewer. How many do they have together?"


def main() -> None:
    engine = ParseEngine.from_pretrained(target="zoo:target", draft="zoo:draft", adapter="zoo:adapter")
    for event in engine.stream(QUESTION):
        match event:
            case Drafted():
                print(f"[round {event.round}: {event.n_tokens} tokens drafted]")
            case Verified():
                print("[validities:", *(f"{segment.validity:.2f}" for segment in event.segments), "]")
            case Accepted():
                print(event.text, end="")
            case Resumed():
                print(event.text, end="", flush=True)
            case Done(answer):
                print(f"\n[{answer.timings.total_s:.2f} s, {answer.stats.target_forwards} target forwards]")


if __name__ == "__main__":
    main()
