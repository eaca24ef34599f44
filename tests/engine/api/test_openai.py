"""The OpenAI client against a served tiny model: what it may ask for is what it gets."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest

from tests.engine.api.conftest import KEY
from tests.engine.api.served import Served, eventually

MODEL = "tiny"
PROMPT = "The quick brown fox jumps over"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a forebay?"}]
GREEDY: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0,
    "extra_body": {"ignore_eos": True, "return_token_ids": True},
}
DRAWN: dict[str, Any] = {"model": MODEL, "temperature": 1, "extra_body": {"ignore_eos": True}}


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **more: Any) -> Any:
    return client.completions.create(**{**GREEDY, "prompt": prompt, "max_tokens": 24} | more)


def chat(client: openai.OpenAI, messages: Any = MESSAGES, **more: Any) -> Any:
    return client.chat.completions.create(**{**GREEDY, "messages": messages, "max_tokens": 24} | more)


def tokenize(served: Served, **body: Any) -> list[int]:
    status, found = served.post("/tokenize", body)
    assert status == 200 and found["count"] == len(found["tokens"])
    return list(found["tokens"])


def test_models_are_listed_and_described(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL and client.models.retrieve(MODEL).owned_by == "forebay"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_a_prompt_is_text_or_ids_alone_or_in_a_list(client: openai.OpenAI, served: Served) -> None:
    ids = tokenize(served, prompt=PROMPT)
    alone = complete(client)
    assert alone.object == "text_completion" and alone.choices[0].finish_reason == "length"
    assert alone.usage.prompt_tokens == len(ids) and alone.usage.completion_tokens == 24
    assert alone.choices[0].token_ids and alone.choices[0].prompt_token_ids == ids
    text = alone.choices[0].text
    assert complete(client, ids).choices[0].text == text
    for prompts in ([PROMPT, "One two"], [ids, tokenize(served, prompt="One two")]):
        several = complete(client, prompts)
        assert [choice.index for choice in several.choices] == [0, 1]
        assert several.choices[0].text == text != several.choices[1].text
        assert several.usage.prompt_tokens == len(ids) + len(tokenize(served, prompt="One two"))
    served.at_rest()


def test_echo_puts_the_prompt_before_the_answer_in_one_piece_and_in_a_stream(client: openai.OpenAI) -> None:
    text = complete(client).choices[0].text
    assert complete(client, echo=True).choices[0].text == PROMPT + text
    streamed = "".join(chunk.choices[0].text for chunk in complete(client, echo=True, stream=True))
    assert streamed == PROMPT + text


def test_a_streamed_completion_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    whole = complete(client)
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [i for chunk in chunks[:-1] for i in chunk.choices[0].token_ids] == whole.choices[0].token_ids
    assert chunks[-2].choices[0].finish_reason == "length" and chunks[0].usage is None
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24


def test_a_streamed_chat_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    whole = chat(client, logprobs=True, top_logprobs=2)
    chunks = list(chat(client, logprobs=True, top_logprobs=2, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    told = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert told == whole.choices[0].logprobs.content
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.choices for chunk in chunks)  # no usage was asked for


def test_n_gives_choices_of_their_own_and_the_first_is_the_only_one_of_n_1(
    client: openai.OpenAI, served: Served
) -> None:
    ask: dict[str, Any] = {**DRAWN, "seed": 11, "max_tokens": 20}
    three = client.chat.completions.create(messages=MESSAGES, n=3, **ask)
    texts = [choice.message.content for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert three.usage is not None and three.usage.completion_tokens == 60
    one = client.chat.completions.create(messages=MESSAGES, **ask)
    assert one.choices[0].message.content == texts[0]
    assert one.usage is not None and one.usage.prompt_tokens == three.usage.prompt_tokens
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(messages=MESSAGES, n=3, stream=True, **ask):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
    served.at_rest()


def test_a_seed_repeats_and_none_does_not(client: openai.OpenAI) -> None:
    def draw(**more: Any) -> Any:
        return client.completions.create(prompt=PROMPT, max_tokens=24, **DRAWN, **more).choices[0].text

    assert draw(seed=5) == draw(seed=5) != draw(seed=6)
    assert draw() != draw()


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, stream: bool) -> None:
    text = complete(client).choices[0].text
    stop = next(text[i : i + 3] for i in range(6, len(text) - 3) if text[i : i + 3].isascii())
    answer = complete(client, stop=["never to come", stop], stream=stream)
    if stream:
        chunks = list(answer)
        found, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        found, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert found == text[: text.index(stop)] and reason == "stop"


def test_logprobs_of_a_chat_are_a_distribution_and_name_their_bytes(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=5)
    content = answer.choices[0].logprobs.content
    assert len(content) == 24
    for one in content:
        assert [other.logprob for other in one.top_logprobs] == sorted(
            (o.logprob for o in one.top_logprobs), reverse=True
        )
        assert one.top_logprobs[0].token == one.token and one.logprob <= 0  # greedy: the likeliest
        assert sum(math.exp(other.logprob) for other in one.top_logprobs) <= 1 + 1e-6
        text = bytes(one.bytes).decode("utf-8", "replace")
        assert one.token == text or ("\ufffd" in text and one.token.startswith("bytes:\\x"))
    assert b"".join(bytes(one.bytes) for one in content).decode("utf-8", "replace") == answer.choices[0].message.content
    assert chat(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert chat(client).choices[0].logprobs is None


def test_logprobs_of_a_completion_say_where_in_the_text_each_token_stands(client: openai.OpenAI) -> None:
    # Noise has parts of characters in it, which are no text of their own: take an answer that begins with whole ones.
    for prompt in (f"{number} quick brown foxes" for number in range(50)):
        answer = complete(client, prompt, logprobs=3).choices[0]
        told = answer.logprobs
        whole = [token for token in told.tokens if not token.startswith("bytes:")]
        if whole[:3] == told.tokens[:3]:
            break
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == 24
    assert told.text_offset == sorted(told.text_offset)
    for token, at in zip(whole[:3], told.text_offset, strict=False):
        assert answer.text[at : at + len(token)] == token
    for top, token, value in zip(told.top_logprobs, told.tokens, told.token_logprobs, strict=True):
        assert top[token] == value
    chunks = [chunk.choices[0] for chunk in complete(client, prompt, logprobs=3, stream=True)]
    streamed = [chunk.logprobs for chunk in chunks if chunk.logprobs]
    assert [offset for one in streamed for offset in one.text_offset] == told.text_offset


def test_a_chat_goes_on_to_the_end_of_its_context_unless_told_otherwise(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "ten " * 2000}]
    answer = chat(client, long, max_tokens=None)
    limit = client.models.retrieve(MODEL).model_dump()["max_model_len"]
    assert answer.usage.total_tokens == limit == 4096 and answer.choices[0].finish_reason == "length"
    assert chat(client, max_tokens=None, max_completion_tokens=5).usage.completion_tokens == 5


def test_a_second_turn_reuses_the_first_ones_blocks_under_the_same_salt_only(client: openai.OpenAI) -> None:
    first = "seven eight nine " * 30

    def cached(prompt: str, salt: str | None) -> int:
        more = {"cache_salt": salt} if salt else {}
        usage = complete(client, prompt, max_tokens=1, extra_body=more).usage
        assert usage.prompt_tokens_details.cached_tokens == usage.forebay["pool_tokens"]
        return int(usage.prompt_tokens_details.cached_tokens)

    assert cached(first, "a") == 0
    assert cached(first + "ten", "a") == cached(first, "a") >= 80
    assert cached(first, None) == 0 and cached(first, "b") == 0


def test_tokenize_and_detokenize_are_inverse_and_know_chats(client: openai.OpenAI, served: Served) -> None:
    text = "The login button <|im_end|> überall 🦊"
    ids = tokenize(served, prompt=text)
    assert served.post("/detokenize", {"tokens": ids}) == (200, {"prompt": text})
    assert tokenize(served, messages=MESSAGES) == chat(client).choices[0].prompt_token_ids


async def test_64_clients_at_once_get_what_each_gets_alone(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=100) as client:

        async def ask(number: int, stream: bool) -> str:
            about: dict[str, Any] = {"prompt": f"{number} one two three {number}", "max_tokens": 12, **GREEDY}
            if not stream:
                return (await client.completions.create(**about)).choices[0].text
            chunks = await client.completions.create(stream=True, **about)
            return "".join([chunk.choices[0].text async for chunk in chunks])

        together = await asyncio.gather(*(ask(number, number % 2 == 0) for number in range(64)))
        alone = [await ask(number, False) for number in range(0, 64, 7)]
    assert together[::7] == alone and len(set(together)) > 32
    served.at_rest()


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("kind", ["stream", "whole"])
def test_a_client_that_goes_away_leaves_nothing_running(
    served: Served, client: openai.OpenAI, n: int, kind: str
) -> None:
    before = served.at_rest()['forebay_engine_requests_total{finish_reason="abort"}']
    long: dict[str, Any] = {"n": n, "max_tokens": 3500, **DRAWN}
    if kind == "stream":
        stream = client.completions.create(prompt=PROMPT, stream=True, **long)
        for _ in zip(range(3), stream, strict=False):
            pass
        eventually(served.metrics, lambda found: found["forebay_engine_running"] == n, 20, served.log)
        stream.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.5).completions.create(prompt=PROMPT, **long)
    after = served.at_rest()
    assert after['forebay_engine_requests_total{finish_reason="abort"}'] - before == n
