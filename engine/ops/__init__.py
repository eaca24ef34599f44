"""The engine's arithmetic, on tensors: norm, rotary positions, linear layers by precision, attention over pages."""
