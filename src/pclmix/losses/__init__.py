"""The losses of the paper, one idea per file, each equation one pure function of tensors (docs/equations.md).

Axes: B batch, K classes (background first), H, W, D embedding width, N anchors, Q queue length. Every shape is fixed
by the inputs' shapes and nothing waits for a value on the host, so that a whole step can be captured as one graph.
"""
