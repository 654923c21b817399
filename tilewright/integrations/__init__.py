"""Tilewright inside other frameworks' own interfaces: torch.compile's backends, ONNX's backend class."""
