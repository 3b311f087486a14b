"""SAINT: rows exchange information in training, and a prediction does not depend on the other rows asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.models.saint import SAINT, RowAttention

SPEC = TableSpec(TaskType.MULTICLASS, 3, (4, 2), 3)


def batch(rows: int = 9, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_cat = torch.stack([torch.randint(n, (rows,), generator=generator) for n in SPEC.cat_cardinalities], 1)
    return torch.randn(rows, SPEC.n_num, generator=generator), x_cat


def table(rows: int = 40, seed: int = 7) -> Table:
    x_num, x_cat = batch(rows, seed)
    return Table(x_num.numpy(), x_cat.numpy(), np.arange(rows) % 3)


def network(train: Table | None = None, **hparams: float) -> SAINT:
    torch.manual_seed(1)
    net = SAINT(SPEC, **{"depth": 2, "dim": 8, "heads": 2, "dropout": 0.0, "n_context": 16, **hparams})
    if train is not None:
        net.observe(train)
    return net


def test_in_training_another_row_changes_a_row() -> None:
    net, (x_num, x_cat) = network(table()).train(), batch()
    changed = x_num.clone()
    changed[4] += 1.0
    before, after = net(x_num, x_cat).detach(), net(changed, x_cat).detach()
    assert float((before[0] - after[0]).abs().max()) > 1e-4


def test_rows_attend_over_rows_also_in_their_gradients() -> None:
    net, (x_num, x_cat) = network(table()).train(), batch()
    x_num.requires_grad_()
    heard = torch.autograd.grad(net(x_num, x_cat)[0].square().sum(), x_num)[0].abs().sum(dim=1)
    assert bool((heard > 0).all())


def test_outside_training_a_row_does_not_depend_on_the_request() -> None:
    net, (x_num, x_cat) = network(table()).eval(), batch(30)
    whole = net(x_num, x_cat).detach()
    assert float(whole.std(dim=0).min()) > 1e-3, "the rows differ, so the comparison says something"
    order = torch.randperm(30, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(net(x_num[order], x_cat[order]), whole[order], rtol=0, atol=1e-6)
    for rows in (slice(0, 1), slice(29, 30), slice(3, 8), slice(0, 17)):
        torch.testing.assert_close(net(x_num[rows], x_cat[rows]), whole[rows], rtol=0, atol=1e-6)
    strange = torch.cat([x_num[:1], 50 * torch.ones(5, 3)])
    torch.testing.assert_close(net(strange, x_cat[:6])[:1], whole[:1], rtol=0, atol=1e-6)
    assert net(x_num[:0], x_cat[:0]).shape == (0, 3)


def test_outside_training_a_row_depends_on_the_context() -> None:
    x_num, x_cat = batch()
    one, other = network(table(seed=7)).eval(), network(table(seed=8)).eval()
    assert not torch.allclose(one(x_num, x_cat), other(x_num, x_cat), rtol=0, atol=1e-4)


def test_evaluation_is_a_training_batch_of_the_context_and_the_row_that_the_context_does_not_see() -> None:
    """One layer: the context's own keys do not depend on the row, so both modes give the row the same."""
    net = network(table(rows=12), depth=1, n_context=12)
    x_num, x_cat = batch(1)
    together = net.train()(torch.cat([net.context_num, x_num]), torch.cat([net.context_cat, x_cat]))
    torch.testing.assert_close(net.eval()(x_num, x_cat), together[-1:], rtol=0, atol=1e-6)


def test_fillers_of_a_small_table_are_not_attended_to() -> None:
    x_num, x_cat = batch()
    exact, padded = network(table(rows=5), n_context=5).eval(), network(table(rows=5), n_context=16).eval()
    assert padded.absent.tolist() == [False] * 5 + [True] * 11
    torch.testing.assert_close(padded(x_num, x_cat), exact(x_num, x_cat), rtol=0, atol=1e-6)
    assert bool(network().eval()(x_num, x_cat).isfinite().all()), "nothing observed yet: a row attends to itself"


def test_the_context_is_a_fixed_sample_that_travels_with_the_state() -> None:
    train = table(rows=100)
    first, again, fresh = network(train), network(train), network()
    assert torch.equal(first.context_num, again.context_num)
    assert len({tuple(row) for row in first.context_num.tolist()}) == 16
    rows = {tuple(row) for row in train.x_num.tolist()}
    assert all(tuple(row) in rows for row in first.context_num.tolist())
    fresh.load_state_dict(first.state_dict())
    torch.testing.assert_close(fresh.eval()(*batch()), first.eval()(*batch()))


def test_row_attention_equals_a_loop_over_rows() -> None:
    torch.manual_seed(0)
    attention = RowAttention(10, 2).double()
    x = torch.randn(4, 10, dtype=torch.float64)
    q, k, v = attention.project(attention.norm(x)).chunk(3, dim=-1)
    slow = []
    for i in range(4):
        heads = []
        for h in range(2):
            part = slice(64 * h, 64 * h + 64)
            weights = torch.stack([q[i, part] @ k[j, part] / 8 for j in range(4)]).softmax(0)
            heads.append(sum(weights[j] * v[j, part] for j in range(4)))
        slow.append(attention.out(torch.cat(heads)))
    torch.testing.assert_close(attention(x, None, None)[0], torch.stack(slow), rtol=0, atol=1e-12)


def test_wide_tables_are_predicted_in_pieces() -> None:
    net, rows = network(table()).eval(), batch(9)
    whole = net(*rows)
    net._piece = 2
    torch.testing.assert_close(net(*rows), whole, rtol=0, atol=1e-6)


def test_cells_are_narrow_on_tables_of_more_than_a_hundred_columns() -> None:
    with torch.device("meta"):
        assert SAINT(TableSpec(TaskType.BINARY, 100, (), 2), dim=32).cells.readout.shape == (32,)
        assert SAINT(TableSpec(TaskType.BINARY, 100, (3,), 2), dim=32).cells.readout.shape == (8,)


@pytest.mark.parametrize(
    ("name", "value"),
    [("depth", 0), ("dim", 0), ("heads", 0), ("n_context", 0), ("row_ff_max", 0), ("dropout", 1.0)],
)
def test_impossible_arguments_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} must"):
        network(**{name: value})
