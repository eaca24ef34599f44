"""Client library: `Client` for threads, `AsyncClient` for an event loop. Importing it loads no torch.

Operations stand once, as generators, in session.py, namespace.py, lease.py and writing.py; blocking.py and aio.py run them.
http.py stands by itself. transport.py moves frames, memory.py maps shared memory, copying.py moves payloads.
"""

from forebay.clients.aio import AsyncAllocation, AsyncClient, AsyncNamespace
from forebay.clients.blocking import Allocation, Client, Namespace
from forebay.clients.http import HttpClient, HttpNamespace
from forebay.clients.lease import Lease
from forebay.clients.results import FlushResult, Match, PutResult, Slot, TierRun

__all__ = [
    "Allocation",
    "AsyncAllocation",
    "AsyncClient",
    "AsyncNamespace",
    "Client",
    "FlushResult",
    "HttpClient",
    "HttpNamespace",
    "Lease",
    "Match",
    "Namespace",
    "PutResult",
    "Slot",
    "TierRun",
]
