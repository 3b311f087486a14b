"""A predictor with random weights, and saved ones that were tampered with."""

from __future__ import annotations

from pathlib import Path

import torch

from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.table import RawDataset
from bishop_ray.models import create_model
from bishop_ray.models.base import Network
from bishop_ray.predictor import Predictor

HPARAMS = {"d_embedding": 8, "stride": 4, "n_pool": 2, "d_model": 16, "d_ff": 16, "n_heads": 2, "n_decoded": 4}


def make_predictor(raw: RawDataset, seed: int = 0) -> Predictor:
    """BiSHop with random weights and fitted bins."""
    torch.manual_seed(seed)
    preprocessor = Preprocessor.fit(raw)
    network = create_model("bishop", preprocessor.spec, HPARAMS)
    assert isinstance(network, Network)
    network.observe(preprocessor.transform(raw))
    return Predictor(preprocessor, network, "bishop", HPARAMS, {"dataset": raw.name, "seed": seed})


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target
