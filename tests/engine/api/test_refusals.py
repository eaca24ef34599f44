"""What a server refuses, and how: OpenAI's error shape, the parameter by its name, nothing of the request in it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.api.served import Served

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "One two"}], "max_tokens": 2}
PLAIN: dict[str, Any] = {"model": "tiny", "prompt": "One two", "max_tokens": 2}
SECRET = "something private"


def error(answer: tuple[int, Any], status: int) -> dict[str, Any]:
    """The error of an answer with that status, in OpenAI's shape."""
    assert answer[0] == status, answer
    assert answer[1].keys() == {"error"} and answer[1]["error"].keys() == {"message", "type", "param", "code"}
    found: dict[str, Any] = answer[1]["error"]
    assert isinstance(found["message"], str) and isinstance(found["type"], str) and SECRET not in found["message"]
    return found


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": SECRET}, "messages"),
        ({"messages": [{"role": SECRET, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"max_tokens": SECRET}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"max_tokens": 1 << 40}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": [SECRET]}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"seed": 1 << 70}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"stop": ["", "x"]}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"temprature": 0}, "temprature"),
        ({"cache_salt": "x" * 1000}, "cache_salt"),
        ({"top_k": -1}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_a_chat_with_a_wrong_value_is_told_which(served: Served, change: dict[str, Any], param: str) -> None:
    found = error(served.post("/v1/chat/completions", CHAT | change), 400)
    assert found["param"] == param and found["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [1, 1 << 40]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["x"] * 40, "n": 10}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_a_completion_with_a_wrong_value_is_told_which(served: Served, change: dict[str, Any], param: str) -> None:
    assert error(served.post("/v1/completions", PLAIN | change), 400)["param"] == param


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": False},
        {
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "logit_bias": {},
            "n": 1,
            "best_of": 1,
        },
        {"tools": None, "stop": None, "seed": None, "stream": None, "temperature": None, "max_completion_tokens": None},
    ],
)
def test_what_changes_nothing_is_accepted(served: Served, harmless: dict[str, Any]) -> None:
    assert served.post("/v1/chat/completions", CHAT | harmless)[0] == 200


@pytest.mark.parametrize(
    ("body", "code"),
    [
        *((body, "invalid_json") for body in (b"", b"{", b"\xff", b"[" * 200_000, b'{"model": "tiny", "seed": NaN}')),
        *((body, None) for body in (b"[]", b"5")),
        (b"{}", "missing_parameter"),
    ],
)
def test_what_is_no_object_is_refused(served: Served, body: bytes, code: str | None) -> None:
    status, found, headers = served.ask("/v1/chat/completions", body)
    assert error((status, found), 400)["code"] == code and headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_not_encoded_as_it_says_is_refused(served: Served, encoding: str) -> None:
    status, found, _ = served.ask("/v1/chat/completions", b"abcde", {"Content-Encoding": encoding})
    assert error((status, found), 400)["code"] == "invalid_body"


def test_a_prompt_over_the_context_says_so_in_openais_words(served: Served) -> None:
    for change in ({"prompt": [5] * 4096}, {"prompt": [5] * 5000}, {"prompt": [5] * 4000, "max_tokens": 97}):
        found = error(served.post("/v1/completions", PLAIN | change), 400)
        assert found["code"] == "context_length_exceeded" and "4096" in found["message"]
    assert served.post("/v1/completions", PLAIN | {"prompt": [5] * 4000, "max_tokens": 96})[0] == 200


def test_what_is_far_too_long_is_refused_before_it_is_tokenized(served: Served) -> None:
    big = 15 << 20
    for path, body, param in (
        ("/tokenize", {"prompt": "a" * big}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * big}]}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "", "name": "a" * big}]}, "messages"),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": ""}] * 100_000}, "messages"),
        ("/v1/completions", PLAIN | {"prompt": "The quick " * (1 << 20)}, "prompt"),
        ("/v1/completions", PLAIN | {"prompt": ["a", "b" * big]}, "prompt"),
        ("/v1/completions", PLAIN | {"prompt": [1] * 4_000_000}, "prompt"),
        ("/detokenize", {"tokens": [1] * 4_000_000}, "tokens"),
    ):
        started = time.monotonic()
        found = error(served.post(path, body), 400)
        assert (found["code"], found["param"]) == ("context_length_exceeded", param)
        assert time.monotonic() - started < 5
    assert error(served.post("/v1/completions", PLAIN | {"prompt": [[1]] * 1_000_000}), 400)["param"] == "prompt"


def test_unknown_models_paths_and_methods_have_their_status(served: Served) -> None:
    found = error(served.post("/v1/completions", PLAIN | {"model": SECRET}), 404)
    assert found["code"] == "model_not_found"
    assert "/v1/completions" in error(served.ask("/v1/nothing")[:2], 404)["message"]
    status, body, headers = served.ask("/v1/completions")
    error((status, body), 405)
    assert headers["Allow"] == "POST"


def test_a_body_over_the_limit_is_refused_by_its_length_or_when_it_gets_there(served: Served) -> None:
    where = urlsplit(served.url)
    assert where.hostname is not None
    for chunked in (False, True):
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=20)
        piece = b'"' + b"x" * ((1 << 20) - 1)
        try:
            if chunked:
                connection.request("POST", "/v1/completions", iter([piece] * 18), encode_chunked=True)
            else:
                connection.putrequest("POST", "/v1/completions")
                connection.putheader("Content-Length", str(18 << 20))
                connection.endheaders()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it had read enough
        response = connection.getresponse()
        assert error((response.status, json.load(response)), 413)["code"] == "request_too_large"
        connection.close()


def test_web_pages_from_elsewhere_are_refused_where_there_are_no_keys(served: Served) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}, {"Host": "[::1"}):
        status, body, _ = served.ask("/v1/models", headers=headers)
        assert error((status, body), 403)["code"] == "foreign_request"
    assert served.ask("/v1/models", headers={"Origin": "http://localhost:3000"})[0] == 200


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["tiny", "user"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = (
    "model",
    "messages",
    "prompt",
    "n",
    "stream",
    "stop",
    "seed",
    "logprobs",
    "top_logprobs",
    "temperature",
    "top_p",
)
NAMES += ("top_k", "min_p", "min_tokens", "stop_token_ids", "echo", "best_of", "stream_options", "cache_salt", "user")


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    chat=st.booleans(),
    changes=st.dictionaries(st.sampled_from(NAMES), VALUES, min_size=1, max_size=3),
    cut=st.none() | st.integers(0, 200),
)
def test_no_body_makes_the_server_fail(served: Served, chat: bool, changes: dict[str, Any], cut: int | None) -> None:
    body = json.dumps((CHAT if chat else PLAIN) | changes).encode()[:cut]
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=20)
    connection.request("POST", "/v1/chat/completions" if chat else "/v1/completions", body)
    response = connection.getresponse()
    said = response.read()
    connection.close()
    assert response.status in (200, 400, 404), (response.status, said)
    if response.status == 200:
        assert said.endswith(b"data: [DONE]\n\n") or json.loads(said)["choices"]
    else:
        error((response.status, json.loads(said)), response.status)


def test_after_all_of_it_the_engine_is_at_rest(served: Served) -> None:
    assert served.at_rest()['forebay_engine_requests_total{finish_reason="error"}'] == 0
    assert not [name for name in served.metrics() if 'status="500"' in name]


# --- servers of their own ---------------------------------------------------------------------------------------------

SMALL = ("--store", "none", "--precision", "fp32", "--block-tokens", "16", "--pool-bytes", "8MiB")


def test_a_full_queue_answers_429_and_the_client_that_waits_gets_in(model_folder: Path, tmp_path: Path) -> None:
    with Served(model_folder, tmp_path, *SMALL, "--max-sequences", "1", "--max-waiting", "1") as served:
        about: dict[str, Any] = {"model": "tiny", "prompt": "One", "extra_body": {"ignore_eos": True}}
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:
            first = client.completions.create(stream=True, max_tokens=3000, **about)
            next(iter(first))
            second = threading.Thread(target=client.completions.create, kwargs={"max_tokens": 1, **about})
            second.start()
            while not served.metrics()["forebay_engine_waiting"]:
                time.sleep(0.02)
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(max_tokens=1, **about)
            assert caught.value.type == "rate_limit_error"
            assert 1 <= int(caught.value.response.headers["Retry-After"]) <= 60
            with pytest.raises(openai.RateLimitError):  # one of n is one too many
                client.completions.create(max_tokens=1, n=2, **about)
            patient = threading.Thread(
                target=client.with_options(max_retries=8).completions.create, kwargs={"max_tokens": 1, **about}
            )
            patient.start()
            first.close()
            second.join(20)
            patient.join(20)
            assert not second.is_alive() and not patient.is_alive()
        served.at_rest()


def test_with_keys_only_their_holders_are_answered(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# for tests\nsk-of-the-first-one-1\n\nsk-of-the-other-one-2\n")
    file.chmod(0o600)
    environ = {"FOREBAY_ENGINE_API_KEY": "sk-from-the-environment"}
    with Served(model_folder, tmp_path, *SMALL, "--api-keys-file", str(file), environ=environ) as served:
        for key in ("sk-of-the-first-one-1", "sk-of-the-other-one-2", "sk-from-the-environment"):
            with openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) as client:
                assert client.completions.create(model="tiny", prompt="One", max_tokens=1).choices
        for wrong in ("sk-of-the-first-one-", "# for tests", "x" * 5000, "sk-of-the-first-one-1x"):
            with openai.OpenAI(base_url=f"{served.url}/v1", api_key=wrong, max_retries=0) as client:
                with pytest.raises(openai.AuthenticationError) as caught:
                    client.models.list()
                assert caught.value.code == "invalid_api_key"
        for path in ("/metrics", "/v1/models", "/nothing"):
            status, body, headers = served.ask(path)
            error((status, body), 401)
            assert headers["WWW-Authenticate"].startswith("Bearer")
        assert served.ask("/health")[:2] == (200, {"status": "ok"})
        assert "sk-" not in served.log()


def test_a_drain_finishes_what_has_begun_and_refuses_what_is_new(model_folder: Path, tmp_path: Path) -> None:
    with Served(model_folder, tmp_path, *SMALL) as served:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:
            about: dict[str, Any] = {"model": "tiny", "prompt": "One", "extra_body": {"ignore_eos": True}}
            stream = iter(client.completions.create(stream=True, max_tokens=700, **about))
            next(stream)
            served.process.terminate()
            while served.ask("/health")[0] == 200:
                time.sleep(0.01)
            assert served.ask("/health")[1] == {"status": "draining"}
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(max_tokens=1, **about)
            assert caught.value.status_code == 503 and caught.value.response.headers["Retry-After"]
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert served.process.wait(20) == 0


def test_a_drain_that_runs_out_of_time_ends_streams_with_an_error(model_folder: Path, tmp_path: Path) -> None:
    with Served(model_folder, tmp_path, *SMALL, "--drain-s", "0.2") as served:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:
            about: dict[str, Any] = {"model": "tiny", "prompt": "One", "extra_body": {"ignore_eos": True}}
            stream = iter(client.completions.create(stream=True, max_tokens=4000, **about))
            next(stream)
            served.process.terminate()
            with pytest.raises(openai.APIError, match="shutting down"):
                for _ in stream:
                    pass
        assert served.process.wait(20) == 0
