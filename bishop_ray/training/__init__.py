"""How one trial is trained: metrics, the loop, its checkpoints, and the Ray Train side of it."""
