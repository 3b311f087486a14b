"""MLflow model registry: registration, aliases, promotion, the gate before an alias, loading.

Importing this package does not import mlflow; the functions do, when called.
"""

from __future__ import annotations

from bishop_ray.registry.gate_cases import Evidence, Validation
from bishop_ray.registry.loading import find_version, load_best
from bishop_ray.registry.register import RegisteredModel, register_best

__all__ = ["Evidence", "RegisteredModel", "Validation", "find_version", "load_best", "register_best"]
