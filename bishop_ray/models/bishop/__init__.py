"""BiSHop (Xu et al., ICML 2024): bi-directional sparse Hopfield network for tables.

Letters of shapes, the same in every file of this folder:

===  ==========================================================================================
B    rows of a batch
N    numerical columns
C    categorical columns
F    features, F = C + N, categorical ones first
E    embedding width of a feature (G in the paper)
A    the axis that is kept apart: features by default, embedding positions with swapped directions
T    the axis that is cut into patches: embedding positions by default, else features
L    stride: positions per patch
P    patches at the level in question
D    width of the hidden state of a cell (``d_model``)
H    heads
M    pooling prototypes (C in the paper)
S    decoded representations per entry of A, a multiple of L
K    outputs
===  ==========================================================================================
"""

from __future__ import annotations

from bishop_ray.models.bishop.model import BiSHop

__all__ = ["BiSHop"]
