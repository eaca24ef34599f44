"""The bundled engine: paged KV, continuous batching, prefix reuse. Needs the `engine` extra."""
