"""Losses: labels, uncertainty, contrast, consistency, regularisers, pseudo labels. Equations: docs/equations.md.

Axes: B batch, K classes (background first), H, W, D embedding width, N anchors, Q queue length. Output shapes depend on
input shapes alone and no function waits for a value on the host, so that a training step can be captured as one graph.
"""
