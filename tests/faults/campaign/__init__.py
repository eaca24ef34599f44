"""The fault campaign: a store with RAM and SSD under many seeded faults, beside an oracle that knows every byte.

`python -m tests.faults.campaign` (or `make test-faults`) runs it and prints its seed and a table of the faults that were seen
to fire. Two parts: lives inside this process, whose disk fails at the seam of its system calls (`lives`, `disk`), and real
daemon and engine processes that are killed, stopped and cut off (`processes`). Always true: a fault counts where it fires, not
where it is planned.
"""
