"""The schedule of a run: its operations in order, and the buffers (slots) that they use."""
