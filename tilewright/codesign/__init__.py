"""An accelerator and its programs, explored together: layers as loop nests, mappings of them onto Gemmini, and a
differentiable model of what a mapping costs on a hardware point."""
