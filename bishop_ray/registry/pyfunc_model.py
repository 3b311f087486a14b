"""MLflow pyfunc model of a registered predictor ("models from code"); part of each model's artifacts.

Read by ``mlflow.pyfunc.load_model``; nothing else imports it.
https://mlflow.org/docs/latest/ml/model/models-from-code/
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel, PythonModelContext


class RegisteredPredictor(PythonModel):
    """A `Predictor` behind MLflow's interface."""

    def load_context(self, context: PythonModelContext) -> None:
        """Loads the predictor folder among the artifacts."""
        # Here, not above: the copy of the package among the artifacts is importable only now.
        from bishop_ray.predictor import Predictor

        self._predictor = Predictor.load(context.artifacts["predictor"])

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.Series | pd.DataFrame:
        """Labels or target values; class probabilities with ``params={"proba": True}``."""
        frame = model_input if isinstance(model_input, pd.DataFrame) else pd.DataFrame(model_input)
        if (params or {}).get("proba"):
            return self._predictor.predict_proba(frame)
        return self._predictor.predict(frame)


set_model(RegisteredPredictor())
