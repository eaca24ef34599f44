"""The bundled engine's prefix store over Forebay: `ForebayPrefixStore`, an implementation of engine/prefix.py.

    store = connect("/run/forebay.sock", facts, prior=prior)   # or "tcp://host:port", "http://host:port"

facts.py says what a model's KV is, link.py keeps the way to a daemon that may be absent, pool.py sees the engine's pool as
bytes (cuda.py where it lies on a GPU), loading.py and storing.py move blocks, store.py decides and ties them together. Always
true: nothing here makes the engine's thread wait, and trouble with a daemon is a counted miss.
"""

from forebay.engine_adapter.bundled.facts import namespace_facts, prefill_prior
from forebay.engine_adapter.bundled.store import ForebayPrefixStore, connect

__all__ = ["ForebayPrefixStore", "connect", "namespace_facts", "prefill_prior"]
