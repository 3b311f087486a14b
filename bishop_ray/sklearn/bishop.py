"""BiSHop as scikit-learn classifier and regressor."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.utils import check_random_state
from tqdm.auto import tqdm

from bishop_ray.config import TrainConfig
from bishop_ray.data.preprocess import Preprocessor, encoded
from bishop_ray.data.table import RawDataset
from bishop_ray.models import create_model
from bishop_ray.models.base import Network
from bishop_ray.models.bishop.model import BiSHop
from bishop_ray.predictor import Predictor
from bishop_ray.signals import stopped_by_ctrl_c
from bishop_ray.sklearn.estimators import Classifier, Regressor, Tabular
from bishop_ray.sklearn.input_validation import make_parts
from bishop_ray.training.loop import fit_network
from bishop_ray.training.results import EpochResult

MODEL = "bishop"
_NETWORK = set(inspect.signature(BiSHop).parameters)
_TRAIN = {field.name for field in fields(TrainConfig)}


class BiSHopEstimator(Tabular):
    """What classifier and regressor have in common.

    A parameter that is None has the default of the network (`models.bishop.BiSHop`) or of the training
    (`config.TrainConfig`), which also say what each one means.

    Args:
        validation_fraction: Share of the rows that chooses the best epoch and ends the training; never trained on.
        random_state: Draws these rows and seeds the training: an int, a RandomState or None.
        verbose: 1 shows a bar of epochs on standard error.

    Attributes:
        n_iter_: Epochs trained.
        history_: Validation score of each epoch, larger is better.
    """

    _default_metric: str

    def __init__(
        self,
        *,
        d_embedding: int | None = None,
        stride: int | None = None,
        n_pool: int | None = None,
        n_merge: int | None = None,
        d_model: int | None = None,
        d_ff: int | None = None,
        n_heads: int | None = None,
        n_encoder_levels: int | None = None,
        decoder: bool | None = None,
        n_decoded: int | None = None,
        dropout: float | None = None,
        head_dropout: float | None = None,
        activation: str | None = None,
        numeric_embedding: str | None = None,
        max_epochs: int | None = None,
        patience: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        weight_decay: float | None = None,
        metric: str | None = None,
        precision: str | None = None,
        validation_fraction: float = 0.2,
        random_state: int | np.random.RandomState | None = None,
        verbose: int = 0,
    ) -> None:
        self.d_embedding = d_embedding
        self.stride = stride
        self.n_pool = n_pool
        self.n_merge = n_merge
        self.d_model = d_model
        self.d_ff = d_ff
        self.n_heads = n_heads
        self.n_encoder_levels = n_encoder_levels
        self.decoder = decoder
        self.n_decoded = n_decoded
        self.dropout = dropout
        self.head_dropout = head_dropout
        self.activation = activation
        self.numeric_embedding = numeric_embedding
        self.max_epochs = max_epochs
        self.patience = patience
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.metric = metric
        self.precision = precision
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.verbose = verbose

    def _fit(self, frame: pd.DataFrame, y: NDArray[Any], weights: NDArray[np.float64] | None = None) -> None:
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction: expected a share between 0 and 1; found {self.validation_fraction}")
        given = {name: value for name, value in self.get_params(deep=False).items() if value is not None}
        rng = check_random_state(self.random_state)
        seed = int(rng.randint(2**31 - 1))
        train, val = make_parts(frame, y, self._task, self.validation_fraction, rng, weights)
        preprocessor = Preprocessor.fit(train, BiSHop.numeric)
        hparams = {name: value for name, value in given.items() if name in _NETWORK}
        settings = {"metric": self._default_metric, **{k: v for k, v in given.items() if k in _TRAIN}, "seed": seed}
        self._train(preprocessor, train, val, hparams, TrainConfig(**settings))

    def _train(
        self,
        preprocessor: Preprocessor,
        train: RawDataset,
        val: RawDataset,
        hparams: dict[str, Any],
        config: TrainConfig,
    ) -> None:
        devices = list(range(torch.cuda.device_count()))
        with torch.random.fork_rng(devices=devices):  # the user's own random state stays as it is
            torch.manual_seed(config.seed)
            network = create_model(MODEL, preprocessor.spec, hparams)
            assert isinstance(network, Network)
            history: list[float] = []
            bar = tqdm(total=config.max_epochs, unit="epoch", disable=not self.verbose)
            with stopped_by_ctrl_c() as stop, bar:

                def on_epoch(result: EpochResult) -> bool:
                    history.append(result.val_score)
                    bar.set_postfix_str(f"validation {config.metric} {result.best_val_score:.4f}", refresh=False)
                    bar.update()
                    return stop.asked

                fit_network(
                    network,
                    encoded(preprocessor, train, balance=False),
                    preprocessor.transform(val),
                    config,
                    on_epoch,
                    target_scale=preprocessor.target.units,
                )
        self.predictor_ = Predictor(preprocessor, network.cpu(), MODEL, hparams)
        self.n_iter_ = len(history)
        self.history_ = history


class BiSHopClassifier(Classifier, BiSHopEstimator):
    """BiSHop (Xu et al., ICML 2024) as a classifier; parameters as `BiSHopEstimator`."""

    _default_metric = "accuracy"


class BiSHopRegressor(Regressor, BiSHopEstimator):
    """BiSHop (Xu et al., ICML 2024) as a regressor; parameters as `BiSHopEstimator`."""

    _default_metric = "r2"
