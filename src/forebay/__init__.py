"""Forebay: a storage-tiered KV cache service for LLM inference.

The sub-packages stand at the repository's root (kvstore, tiers, server, clients, engine, engine_adapter) and
install under this one name, so that words like `server` never land in a user's site-packages.
"""

__version__ = "0.1.0"
