"""Identity, keys, block format, wire frames, the Tier protocol, index, policies, cost model, plans and the store.

Imports none of Forebay's other packages, and no torch, lmdb or aiohttp.
"""
