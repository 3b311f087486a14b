"""Private parts of scikit-learn: trees made from arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

VERIFIED = "1.9.1"
"""The version that all of this was read and tried in; ``pyproject.toml`` allows its minor series alone."""


def empty_nodes(count: int) -> NDArray[Any]:
    """So many nodes of trees, all zero, in scikit-learn's own record type. Seen in scikit-learn 1.9.1."""
    from sklearn.tree._tree import NODE_DTYPE

    return np.zeros(count, NODE_DTYPE)


def make_tree(n_inputs: int, depth: int, nodes: NDArray[Any], values: NDArray[np.float64]) -> Any:
    """A tree that predicts as the one did whose arrays these are.

    `sklearn.tree` offers trees that are fitted alone; a pickle, the other way, would run code when it is read. Seen in
    scikit-learn 1.9.1.

    Args:
        n_inputs: Columns.
        depth: Of the deepest node.
        nodes: As `empty_nodes` gives them, filled.
        values: (nodes, 1, values per leaf).
    """
    from sklearn.tree._tree import Tree

    tree = Tree(n_inputs, np.array([values.shape[2]], dtype=np.intp), 1)
    state = {"max_depth": depth, "node_count": len(nodes)}
    tree.__setstate__(state | {"nodes": nodes.copy(), "values": values.copy()})
    return tree
