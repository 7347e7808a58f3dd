"""Requests that a server must survive: bodies drawn from its OpenAPI document, and mutations of good requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": "Tom has 5 apples."}], "max_tokens": 1, "temperature": 0}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "max_tokens": 1, "n": 1}),
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "stream": True, "stop": ["x"]}),
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "parse": {"threshold": 0.5}}),
    (PLAIN, {"prompt": "Once", "max_tokens": 1, "seed": 3}),
    (PLAIN, {"prompt": [[65, 66], [67]], "max_tokens": 1}),
    ("/tokenize", {"prompt": "Once"}),
    ("/detokenize", {"tokens": [65, 66]}),
]
ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, -(2**200), 1e308, -0.0, 1e-320, "", "x", "\x00", "\udc80", "é" * 50, [], {},
    [[]], [None], {"": {}}, {"a": 1}, ["a", 1], "x" * 5000, "\u202e", 3.5,
]  # fmt: skip
LITTLE = 2  # tokens of an answer, so that a valid request costs little


def of_schema(schema: Any, document: Any, random: Random, depth: int = 0) -> Any:
    """A value that fits a JSON schema, with here and there one that does not."""
    if random.random() < 0.04 or depth > 8:
        return random.choice(ODD)
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/components/schemas/")
        return of_schema(document["components"]["schemas"][name], document, random, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return of_schema(random.choice(schema[key]), document, random, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return random.choice(schema["enum"])
    kind = schema.get("type")
    if kind == "object":
        required = schema.get("required", [])
        found = {
            name: of_schema(own, document, random, depth + 1)
            for name, own in schema.get("properties", {}).items()
            if (name in required and random.random() > 0.02) or random.random() < 0.2
        }
        return found | ({f"extra{random.randrange(9)}": random.choice(ODD)} if random.random() < 0.1 else {})
    if kind == "array":
        n = random.choice([0, 1, 1, 2, 3, schema.get("minItems", 1), min(schema.get("maxItems", 4), 40)])
        return [of_schema(schema.get("items", {}), document, random, depth + 1) for _ in range(n)]
    if kind == "string":
        return "".join(chr(random.choice([random.randrange(32, 127), random.randrange(0xD000)])) for _ in range(5))
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", -5), schema.get("maximum", 50)
        return random.randint(int(low), int(max(low, high))) if kind == "integer" else random.uniform(low, high)
    if kind == "boolean":
        return random.random() < 0.5
    return random.choice(ODD)


def posts(document: Any) -> list[tuple[str, Any]]:
    """Paths with the schema of their JSON body, and those without a body."""
    found = []
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in content:
            found.append((path, content["application/json"]["schema"]))
    return found


def from_document(document: Any, random: Random) -> tuple[str, bytes]:
    """Path and body of a request that the document describes."""
    path, schema = random.choice(posts(document))
    body = of_schema(schema, document, random)
    if isinstance(body, dict) and path in (CHAT, PLAIN):
        for name in ("max_tokens", "max_completion_tokens"):
            if not isinstance(body.get(name, LITTLE + 1), int) or body.get(name, LITTLE + 1) > LITTLE:
                body[name] = LITTLE
        if isinstance(body.get("n"), int) and body["n"] > 2:
            body["n"] = random.choice([1, 2, 17, 2**40])
    return path, json.dumps(body).encode(errors="surrogatepass")


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container of a value with each of its keys."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


def mutated(random: Random) -> tuple[str, bytes, dict[str, str]]:
    """Path, body and headers of a good request that was damaged."""
    path, good = random.choice(GOOD)
    body = json.loads(json.dumps(good))
    headers = {"Content-Type": "application/json"}

    def odd_value() -> bytes:
        container, key = random.choice(_places(body))
        container[key] = random.choice(ODD)
        return json.dumps(body).encode(errors="surrogatepass")

    def nested() -> bytes:
        container, key = random.choice(_places(body))
        container[key] = "NEST"
        depth = random.choice([50, 900, 5000, 100_000])
        opening, closing = random.choice([(b"[", b"]"), (b'{"a":', b"}")])
        return json.dumps(body).encode().replace(b'"NEST"', opening * depth + b"1" + closing * depth)

    def number() -> bytes:
        container, key = random.choice(_places(body))
        container[key] = "NUMBER"
        huge = random.choice([b"1" * 5000, b"1e99999", b"-1e400", b"NaN", b"Infinity", b"0x10", b"1.", b"-", b"01"])
        return json.dumps(body).encode().replace(b'"NUMBER"', huge)

    def truncated() -> bytes:
        raw = json.dumps(body).encode()
        return raw[: random.randrange(len(raw))]

    def bytes_changed() -> bytes:
        raw = bytearray(json.dumps(body).encode())
        for _ in range(random.choice([1, 3, 10])):
            raw[random.randrange(len(raw))] = random.randrange(256)
        return bytes(raw)

    def encoded() -> bytes:
        return json.dumps(body).encode(random.choice(["utf-16", "utf-32", "utf-8-sig", "utf-7"]))

    def many() -> bytes:
        container, key = random.choice(_places(body))
        container[key] = [container[key]] * 5000
        return json.dumps(body).encode()

    def wrong_head() -> bytes:
        raw = json.dumps(body).encode()
        name, value = random.choice(
            [
                ("Content-Type", "text/plain"), ("Content-Type", "application/json; charset=utf-16"),
                ("Content-Type", ""), ("Content-Length", "-1"), ("Content-Length", "x"), ("Content-Length", "3"),
                ("Transfer-Encoding", "chunked"), ("Content-Encoding", "gzip"), ("Authorization", "Bearer \xff\xfe"),
                ("X-Request-Id", "a" * 9000), ("Accept", "image/png"), ("Host", ""), ("Expect", "100-continue"),
                ("traceparent", "00-zz-00"), ("Connection", "Upgrade"), ("X\xe4", "1"),
            ]
        )  # fmt: skip
        headers[name] = value
        return raw

    makers: list[Callable[[], bytes]] = [
        odd_value, odd_value, nested, number, truncated, bytes_changed, encoded, many, wrong_head,
    ]  # fmt: skip
    return path, random.choice(makers)(), headers


def message(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """The request as bytes: a client's library would refuse some of them."""
    lines = {"Host": "a", "Content-Length": str(len(body)), "Connection": "close", **headers}
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return head.encode("latin-1") + b"\r\n" + body
