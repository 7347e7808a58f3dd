import subprocess, os, sys, time
import torch
from parse_infer.backends.replicas import ReplicaPool
from parse_infer.engine import ParseEngine
from parse_infer.models.loading import load_language_model
from parse_infer.models.names import resolve
from tests.parse_infer.backends.test_text_drafts import LLAMA_SERVER

def test_it(connect, random_adapter):
    lm = load_language_model("smollm2", role="target")
    judge = random_adapter(lm.model, logprobs=True)
    known = lm.render("How many?")
    with torch.inference_mode():
        scores = lm.model(torch.tensor([known])).logits[0].float().log_softmax(-1)
    judge.config.logprobs["reference"] = {"ids": known, "logprobs": [scores[i, t].item() for i, t in enumerate(known[1:])]}
    engine = ParseEngine.from_models(lm, lm, judge)
    with subprocess.Popen(["/tmp/llama_venv/bin/python", "-c", LLAMA_SERVER, str(resolve("smollm2"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as p:
        url = next(l.split()[1].decode() for l in p.stdout if l.startswith(b"ready"))
        c, _, _ = connect(engine)
        c.backend._drafts, c.backend.draft = (ReplicaPool("draft", [url], c.backend._client), None), None
        c.backend.run(c.backend.handshake())
        for prompt in ("Why is the sky blue?", "Write a short poem about the sea.", "Explain photosynthesis in two sentences.", "What is a prime number?"):
            alone = c.generate_target(prompt, max_new_tokens=64)
            for block in ("auto", "auto", 16):
                t = time.time(); g = c.generate(prompt, max_new_tokens=64, mode="exact", block_tokens=block); s = g.stats
                print(block, g.fallback, s.rounds, s.draft_forwards, s.draft_tokens, s.accepted_tokens, len(g.token_ids), g.token_ids == alone.token_ids, f"{time.time()-t:.1f}s")
        print({k: (v.costs, [round(x.value,2) for x in v._survival]) for k, v in c.backend._lengths.items()})
