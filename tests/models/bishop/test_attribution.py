"""BiSHop's weights per feature: against the equations one cell at a time; sums, independence of rows, nothing left."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from reference_bishop import Config, Reference
from test_bishop import CASES, SMALL, build

from bishop_ray.data.table import TableSpec, TaskType
from bishop_ray.models.bishop.attribution import feature_weights
from bishop_ray.models.bishop.model import BiSHop

N_FEATURES = 5
HAND = ["no decoder, one level", "mixed heads", "swapped"]


def config_of(case: dict[str, object]) -> Config:
    names = Config.__dataclass_fields__
    arguments = {key: value for key, value in {**SMALL, **case}.items() if key in names}
    return Config(n_num=3, cardinalities=(4, 3), **{"decoder": True, **arguments})


def by_hand(reference: Reference) -> np.ndarray:
    """(F,) of the one row that the reference has evaluated."""
    config, blocks = reference.config, {}
    for name, weights in reference.calls:
        blocks.setdefault(name, []).append(weights)
    return swapped(config, blocks) if config.swap_directions else apart(config, blocks)


def apart(config: Config, blocks: dict) -> np.ndarray:
    heads, m, found = config.n_heads, config.n_pool, []
    for name, pools in blocks.items():
        if not name.endswith("row.pool.association") or name.startswith("decoder.levels.0."):
            continue
        rows = blocks[name.replace("row.pool.association", "row.association")]
        total = np.zeros(N_FEATURES)
        for pool, row in zip(pools, rows, strict=True):  # patch positions
            flat = [pool[h, i] for h in range(heads) for i in range(m)]
            for summary in range(m):
                mixed = flat[summary * heads : (summary + 1) * heads]
                parts = mixed if config.mix_heads else [pool[h, summary] for h in range(heads)]
                read = np.mean([row[h, cell][summary] for h in range(heads) for cell in range(N_FEATURES)])
                total += read * np.mean(parts, axis=0)
        found.append(total / len(pools))
    return np.mean(found, axis=0)


def swapped(config: Config, blocks: dict) -> np.ndarray:
    pad = -N_FEATURES % config.stride
    places = [0] * pad + list(range(N_FEATURES))
    patches = [places[i : i + config.stride] for i in range(0, len(places), config.stride)]
    shares = [[{f: p.count(f) / len(p) for f in p} for p in patches]]
    for level in range(config.n_encoder_levels):
        last = shares[-1]
        if level > 0:
            r = config.n_merge
            if len(last) < r:
                last = (last * r)[:r]
            elif len(last) % r:
                last = last + last[-(r - len(last) % r) :]
            groups = [last[i : i + r] for i in range(0, len(last), r)]
            last = [{f: sum(p.get(f, 0) for p in g) / r for f in range(N_FEATURES)} for g in groups]
        shares.append(last)
    names = {f"encoder.levels.{i}.block.column.association": shares[i + 1] for i in range(config.n_encoder_levels)}
    names |= {f"decoder.levels.{i}.cross": shares[i] for i in range(config.n_encoder_levels + 1)}
    found = []
    for name, share in names.items():
        weights = np.mean([w for call in blocks[name] for w in call.values()], axis=0)
        found.append([sum(weights[p] * share[p].get(f, 0) for p in range(len(share))) for f in range(N_FEATURES)])
    return np.mean(found, axis=0)


@pytest.mark.parametrize("case", HAND)
def test_equals_the_equations_cell_by_cell(case: str) -> None:
    model, x_num, x_cat = build(**CASES[case])
    model = model.double().eval()
    rows, codes = x_num.double()[:1] * 2, x_cat[:1]
    reference = Reference(config_of(CASES[case]), model.state_dict())
    found = feature_weights(model, rows.numpy(), codes.numpy())
    reference(rows[0].tolist(), codes[0].tolist())
    np.testing.assert_allclose(found[0], by_hand(reference), rtol=1e-6)
    assert found.std() > 1e-3, "something is told apart"


@pytest.mark.parametrize("case", CASES)
def test_a_rows_weights_sum_to_one_and_are_its_own(case: str) -> None:
    model, x_num, x_cat = build(**CASES[case])
    model.train()
    rows, codes = np.tile(x_num.numpy(), (40, 1)), np.tile(x_cat.numpy(), (40, 1))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    records = [(a.record, a.nonzero) for a in model.associations().values()]
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    found = feature_weights(model, rows, codes)
    assert found.shape == (len(rows), N_FEATURES)
    assert (found >= 0).all()
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-6)
    alone = np.concatenate([feature_weights(model, rows[[i]], codes[[i]]) for i in (0, 3)])
    np.testing.assert_allclose(alone, found[[0, 3]], atol=1e-6)
    assert feature_weights(model, rows[:0], codes[:0]).shape == (0, N_FEATURES)
    assert model.training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert [(a.record, a.nonzero) for a in model.associations().values()] == records
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert not any(a.activation._forward_hooks for a in model.associations().values())


def test_one_feature_or_one_prototype_or_no_association() -> None:
    rows = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    none = np.zeros((6, 0), np.int64)
    for swap, n_num in product((False, True), (1, 3)):
        network = BiSHop(TableSpec(TaskType.BINARY, n_num, (), 2), **{**SMALL, "n_pool": 1, "swap_directions": swap})
        found = feature_weights(network, rows[:, :n_num], none)
        np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-6)
        if n_num == 1:
            assert (found == 1).all()
    spec = TableSpec(TaskType.BINARY, 3, (), 2)
    assert feature_weights(BiSHop(spec, **{**SMALL, "module": "mlp"}), rows, none) is None
