"""Explain tells why, the alarms tell that, and neither tells what anybody wrote."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from forebay.clients import Client, HttpClient
from forebay.kvstore.errors import ProtocolError
from forebay.server.ceiling import Ceiling
from tests.daemon_process import MIB, DaemonProcess, facts_of, payload_of, serving, tokens_of


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path_factory.mktemp("explain"), http_port=0, ram_bytes=4 * MIB)


def stored(space: Any, tokens: list[int]) -> list[bytes]:
    keys: list[bytes] = space.keys(tokens)
    payloads = [payload_of(space.id, key, space.layout().payload_bytes) for key in keys]
    assert space.put(keys, tokens, payloads).stored == len(keys)
    return keys


def test_explain_says_stored_evicted_deleted_and_never_and_names_the_fact_that_differs(running: DaemonProcess) -> None:
    with Client(running.socket) as client:
        space, salted = client.open(facts_of(salt=b"a")), client.open(facts_of(salt=b"b"))
        other = client.open(facts_of(salt=b"c", kv_dtype="fp16"))  # differs in two: not near
        tokens = tokens_of(1, 4)
        keys = stored(space, tokens)
        stored(other, tokens)
        assert [answer["tiers"] for answer in space.explain(keys)] == [["ram"]] * 4
        (never,) = salted.explain(salted.keys(tokens)[:1])
        assert never["why"].startswith("never stored")
        assert never["near"] == [{"namespace": space.id.hex(), "differs_in": "salt", "objects_in_ram": 4}]
        space.delete(keys[:1])
        (gone,) = space.explain(keys[:1])
        assert gone["why"] == "deleted" and gone["ago_s"] in (0, 1)
        for seed in range(10, 60):
            stored(space, tokens_of(seed, 8))
        (evicted,) = space.explain(keys[1:2])
        assert evicted["why"] == "evicted"
        counters = client.stats()["tiers"]["ram"]["counters"]
        assert counters["evicted_unused"] == counters["evicted"] > 0
        client.purge()
    running.at_base()


def test_blocks_that_were_hit_do_not_count_as_stored_in_vain(running: DaemonProcess) -> None:
    with Client(running.socket) as client:
        space = client.open(facts_of(salt=b"hit"))
        before = client.stats()["tiers"]["ram"]["counters"]
        tokens = tokens_of(2, 8)
        keys = stored(space, tokens)
        with space.acquire(keys):
            pass
        for seed in range(100, 140):
            stored(space, tokens_of(seed, 8))
        after = client.stats()["tiers"]["ram"]["counters"]
        evicted = after["evicted"] - before["evicted"]
        assert space.match(keys).blocks == 0
        assert after["evicted_unused"] - before["evicted_unused"] == evicted - 8
        client.purge()
    running.at_base()


def test_the_ceiling_counts_what_an_infinite_cache_would_have_hit() -> None:
    ceiling = Ceiling(remembered=8)
    sampled = [bytes([number]) * 15 + b"\0" for number in range(4)]
    ignored = [bytes([number]) * 15 + b"\x41" for number in range(4)]
    ceiling.asked_for(b"".join(sampled + ignored), 0)
    assert (ceiling.asked, ceiling.hit, ceiling.possible) == (4, 0, 0)
    ceiling.asked_for(b"".join(sampled), 1)
    assert (ceiling.asked, ceiling.hit, ceiling.possible) == (8, 1, 4)
    assert ceiling.stats()["hit_share_of_possible"] == 0.25
    for number in range(100):
        ceiling.asked_for(number.to_bytes(15, "big") + b"\0", 0)
    assert ceiling.stats()["remembered"] == 8
    ceiling.asked_for(b"", 0)


def test_no_token_prompt_or_payload_reaches_a_log_a_metric_an_explanation_or_an_error(running: DaemonProcess) -> None:
    """A marker in every place that carries a user's text, through both doors, and a look at all that comes out."""
    tokens = [77_000_001 + number for number in range(64)]  # as token ids,
    text = "zebra-crossing-prompt"  # and as text where bytes are free
    url = running.stats()["http_url"]
    said: list[str] = []
    with Client(running.socket, engine_id="e") as client, HttpClient(url) as http:
        for space in (client.open(facts_of(salt=text.encode())), http.open(facts_of(salt=text.encode()))):
            keys = space.keys(tokens)
            size = space.layout().payload_bytes
            payload = (text.encode() * size)[:size]
            assert space.put(keys, tokens, [payload] * 4).stored == 4
            assert space.get_into(keys, bytearray(4 * size), tokens) == 4
            space.match(keys)
            space.delete(keys[:1])
        local = client.open(facts_of(salt=text.encode()))
        said.append(str(local.explain(keys)))
        said.append(str(client.open(facts_of(salt=b"near")).explain(keys)))
        path = f"/v1/namespaces/{space.id.hex()}"
        for rest, table in (
            ("keys", {"token_ids": [*tokens, -1]}),
            ("keys", {"token_ids": text}),
            ("match", {"keys": [text]}),
            ("match", {"keys": text}),
            ("pin", {"keys": [keys[0].hex()], "seconds": text}),
        ):
            with pytest.raises(ProtocolError) as caught:
                http.ask("POST", f"{path}/{rest}", table)
            said.append(str(caught.value))
        for body in (json.dumps(tokens).encode(), text.encode(), payload):
            for kind in ("application/json", "application/msgpack", "application/octet-stream"):
                with pytest.raises(ProtocolError) as caught:
                    http.ask("POST", f"{path}/{'blocks' if 'octet' in kind else 'match'}", body, kind)
                said.append(str(caught.value))
        with pytest.raises(ProtocolError) as caught:
            http.ask("POST", "/v1/namespaces", {"weights_digest": text, "layers": text})
        said.append(str(caught.value))
        said.append(str(client.stats()))
        said.append(json.dumps(http.ask("GET", f"/v1/explain?namespace={space.id.hex()}&keys={keys[0].hex()}")))
        with http.request("GET", "/metrics", (), 0, "", None) as answer:
            said.append(answer.read_all().decode())
        client.purge()
    time.sleep(0.05)
    said.append(running.log)
    everything = "\n".join(said)
    forms = [text, text.encode().hex(), *(str(token) for token in tokens), np.array(tokens[:2], "<u4").tobytes().hex()]
    assert [form for form in forms if form in everything] == []
    running.at_base()
