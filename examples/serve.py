"""Start an OpenAI-compatible server, and send a request with the openai client.

pip install -c constraints.txt ".[serve]" ./zoo openai
python examples/serve.py
"""

import re
import subprocess
import sys

import openai

QUESTION = "A boy has 6 stickers. His brother has 3 fewer. How many do they have together?"


def main() -> None:
    # In production, start the server separately: parse-infer serve --port 8000
    command = [sys.executable, "-m", "parse_infer", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            ready = re.search(r"http://\S+/v1", server.stdout.readline())
            if ready is None:
                raise SystemExit("The server did not start: run `parse-infer serve` to see the error.")
            client = openai.OpenAI(base_url=ready[0], api_key="none")
            answer = client.chat.completions.create(
                model="zoo:target",
                messages=[{"role": "user", "content": QUESTION}],
                extra_body={"parse": {"threshold": 0.9}},  # options of PARSE, outside OpenAI's API
            )
            print(answer.choices[0].message.content)
            print("draft tokens accepted:", answer.usage.completion_tokens_details.accepted_prediction_tokens)
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
