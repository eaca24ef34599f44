"""The ssd tier; see tier.py, and docs/reference/disk-format.md for the bytes."""

from forebay.tiers.ssd.tier import SsdTier

__all__ = ["SsdTier"]
