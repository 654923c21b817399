"""A GPU as a program of this machine: CUDA text compiled by g++ and run, with stricter rules than a card's."""
