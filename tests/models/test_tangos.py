"""TANGOS: both regularisers against differentiating unit by unit, and when they act."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bishop_ray.data.table import TableSpec, TaskType
from bishop_ray.models.tangos import TANGOS, orthogonalisation, specialisation

SPEC = TableSpec(TaskType.MULTICLASS, 3, (4, 2), 3)


def batch(rows: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_cat = torch.stack([torch.randint(n, (rows,), generator=generator) for n in SPEC.cat_cardinalities], 1)
    return torch.randn(rows, SPEC.n_num, generator=generator, dtype=torch.float64), x_cat


def network(**hparams: float) -> TANGOS:
    torch.manual_seed(1)
    return TANGOS(SPEC, **{"d_hidden": 6, "n_layers": 3, **hparams}).double()


def hidden(net: TANGOS, row: Tensor) -> Tensor:
    for layer in net.layers:
        row = torch.relu(layer(row))
    return row


def slow_terms(net: TANGOS, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both terms, one gradient per row and unit, one cosine per row and pair."""
    size, cosines = [], []
    for row in x:
        row = row.clone().requires_grad_()
        units = hidden(net, row)
        grads = [torch.autograd.grad(unit, row, create_graph=True)[0] for unit in units]
        size += [g.abs().sum() / len(g) for g in grads]
        for i in range(len(grads)):
            for j in range(i):
                norms = grads[i].norm() * grads[j].norm()
                cosines.append((grads[i] @ grads[j]).abs() / norms if norms > 0 else torch.zeros((), dtype=x.dtype))
    return torch.stack(size).mean(), torch.stack(cosines).mean()


def test_both_terms_equal_the_slow_reference() -> None:
    net = network()
    x_num, x_cat = batch()
    net(x_num, x_cat)
    found = net.attributions()
    specialised, orthogonal = slow_terms(net, net.inputs(x_num, x_cat))
    assert specialised.item() > 1e-3
    assert 0.05 < orthogonal.item() < 1
    torch.testing.assert_close(specialisation(found), specialised, rtol=0, atol=1e-10)
    torch.testing.assert_close(orthogonalisation(found, 15), orthogonal, rtol=0, atol=1e-10)


def test_penalty_has_the_gradients_of_the_slow_reference() -> None:
    net = network(lambda_1=2.0, lambda_2=0.5)
    x_num, x_cat = batch()
    net(x_num, x_cat)
    penalty = net.penalty()
    assert penalty is not None
    weights = [layer.weight for layer in net.layers]
    fast = torch.autograd.grad(penalty, weights)
    specialised, orthogonal = slow_terms(net, net.inputs(x_num, x_cat))
    slow = torch.autograd.grad(2.0 * specialised + 0.5 * orthogonal, weights)
    for one, other in zip(fast, slow, strict=True):
        assert float(other.abs().max()) > 0
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_a_sample_of_pairs_estimates_all_pairs() -> None:
    attributions = torch.randn(5, 40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = orthogonalisation(attributions, 40 * 39 // 2)
    torch.manual_seed(0)
    estimates = torch.stack([orthogonalisation(attributions, 50) for _ in range(200)])
    assert float(estimates.std()) > 0
    assert abs(float(estimates.mean() - exact)) < 4 * float(estimates.std()) / 200**0.5
    assert not any(float(e) == 1 for e in estimates), "a unit is never compared with itself"


def test_dropout_of_the_forward_pass_is_in_the_attributions() -> None:
    net = network(dropout=0.5)
    x_num, x_cat = batch(rows=64)
    x = net.inputs(x_num, x_cat).requires_grad_()
    net.inputs.forward = lambda *_: x  # type: ignore[method-assign]
    torch.manual_seed(3)
    out = net(x_num, x_cat)
    torch.manual_seed(3)
    torch.testing.assert_close(net(x_num, x_cat), out)
    # The head is linear in the units: its gradient is its weights applied to their attributions.
    slope = torch.autograd.grad(out[:, 0].sum(), x)[0]
    torch.testing.assert_close(net.head.weight[0] @ net.attributions(), slope, rtol=0, atol=1e-12)


def test_penalty_acts_in_training_only() -> None:
    net = network()
    assert net.penalty() is None
    net(*batch())
    assert net.penalty() is not None
    net.eval()
    assert net.penalty() is None
    net(*batch())
    net.train()
    assert net.penalty() is None, "nothing is kept of a pass in evaluation mode"


@pytest.mark.parametrize("rows", [1, 2, 33])
def test_gradients_are_finite_with_dead_units(rows: int) -> None:
    net = network(lambda_1=1.0, lambda_2=1.0)
    with torch.no_grad():
        net.layers[-1].bias[:4] = -100  # four of six units are off in every row
    net(*batch(rows))
    penalty = net.penalty()
    assert penalty is not None
    penalty.backward()
    assert all(bool(p.grad.isfinite().all()) for p in net.layers.parameters() if p.grad is not None)


def test_attributions_of_a_wide_table_come_from_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    net(*batch(rows=9))
    assert net.attributions().shape == (9, 6, net.inputs.width)
    whole = net.attributions()
    monkeypatch.setattr("bishop_ray.models.tangos._PRODUCTS", 4 * net.inputs.width * 6 * 13)
    torch.testing.assert_close(net.attributions(), whole[:4])
    monkeypatch.setattr("bishop_ray.models.tangos._PRODUCTS", 1)
    assert len(net.attributions()) == 1


def test_regularisers_do_what_they_are_for() -> None:
    """Trained on one table, the weighted terms end up lower than without weights."""
    torch.manual_seed(0)
    x_num, x_cat = batch(rows=64)
    y = torch.from_numpy(np.digitize(x_num[:, 0].numpy(), [-0.5, 0.5]))
    ends = []
    for weight in (0.0, 1.0):
        net = network(lambda_1=weight, lambda_2=weight)
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        for _ in range(60):
            loss = torch.nn.functional.cross_entropy(net(x_num, x_cat), y)
            penalty = net.penalty()
            assert penalty is not None
            optimizer.zero_grad()
            (loss + penalty).backward()
            optimizer.step()
        net(x_num, x_cat)
        found = net.attributions().detach()
        ends.append((float(specialisation(found)), float(orthogonalisation(found, 15))))
    assert ends[1][0] < 0.8 * ends[0][0]
    assert ends[1][1] < 0.8 * ends[0][1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_pairs", 0),
        ("d_hidden", 1),
        ("n_layers", 0),
        ("lambda_1", -1.0),
        ("lambda_2", float("nan")),
        ("dropout", 1.0),
    ],
)
def test_impossible_arguments_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} must"):
        TANGOS(SPEC, **{name: value})
