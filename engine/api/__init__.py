"""The engine behind an OpenAI-compatible HTTP API.

`bodies` says what may be asked, `answers` what is said, `streaming` how it is said piece by piece, `server` who may ask it.
"""
