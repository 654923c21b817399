"""Integrations with other frameworks' interfaces: the torch.compile backend and the ONNX backend class."""
