"""Which class of resources a trial asks for, what is refused, and that searches of mixed classes end."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.samplers import RandomSampler
from optuna.trial import TrialState

from bishop_ray.config import Params, Resources, StudyConfig
from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.errors import UserError
from bishop_ray.search.allocation import SuccessiveHalving
from bishop_ray.search.callback import StudyCallback
from bishop_ray.search.cluster import (
    QUIET,
    Cluster,
    _own_token,
    cluster_nodes,
    concurrency,
    shared_slots,
    trial_resources,
)
from bishop_ray.search.dataset import load
from bishop_ray.search.parameters import Range
from bishop_ray.search.placement import (
    CONTEXT,
    COPIES,
    LIBRARY,
    PROCESS,
    SAFETY,
    Node,
    Placement,
    ResourceRequest,
    TooLarge,
    classes,
    gpu_class,
    memory_class,
)
from bishop_ray.search.search import StudyFailed, run_study
from bishop_ray.search.searcher import GIVE_UP, ModelSearcher, TrialSource
from bishop_ray.search.space import SearchSpace, load_space
from bishop_ray.search.study import open_study
from bishop_ray.tracking import runs_frame
from bishop_ray.training.job import StudyData, TrialSettings
from bishop_ray.training.system import smallest_gpu

pytest_plugins = ("study_fixtures",)

GB = 10**9


@pytest.mark.parametrize(
    ("smallest", "shares"),
    [
        (1 / 8, [1 / 8, 1 / 4, 1 / 2, 1]),
        (1 / 2, [1 / 2, 1]),
        (1.0, [1]),
        (1 / 12, [1 / 12, 1 / 8, 1 / 4, 1 / 2, 1]),
    ],
)
def test_classes_are_the_smallest_share_and_the_halvings_above(smallest: float, shares: list[float]) -> None:
    assert classes(smallest) == shares


SMALL, LARGE = Node(8, memory=16 * GB), Node(32, memory=128 * GB)


@pytest.mark.parametrize(
    ("need", "nodes", "cpus", "asked"),
    [
        (1 * GB, [SMALL], 1, 2 * GB),  # no less than its CPUs' share: what is left would let nobody in
        (2 * GB, [SMALL], 1, 2 * GB),
        (2.1 * GB, [SMALL], 1, 4 * GB),
        (9 * GB, [SMALL], 1, 16 * GB),
        (20 * GB, [SMALL], 1, 16 * GB),  # all there is: whoever asks has found that a part of its batch fits
        (1 * GB, [SMALL], 4, 8 * GB),
        (1 * GB, [LARGE, SMALL], 1, 2 * GB),  # of the smallest node that can hold it
        (17 * GB, [SMALL, LARGE], 1, 32 * GB),
        (1 * GB, [SMALL, LARGE], 16, 64 * GB),
        (1 * GB, [Node(8)], 1, 0),
        (1 * GB, [SMALL], 9, 0),
    ],
)
def test_memory_class(need: float, nodes: list[Node], cpus: float, asked: int) -> None:
    assert memory_class(need, nodes, cpus) == asked


@pytest.mark.parametrize(
    ("need", "cards", "smallest", "share"),
    [
        (1 * GB, [80], 1 / 8, 1 / 8),
        (11 * GB, [80], 1 / 8, 1 / 4),
        (11 * GB, [80], 1 / 2, 1 / 2),
        (41 * GB, [80], 1 / 8, 1),
        (90 * GB, [80], 1 / 8, 1),
        (11 * GB, [16, 80], 1 / 8, 1),  # as if it came to the smaller card
        (20 * GB, [16, 80], 1 / 8, 1 / 4),
        (90 * GB, [], 1 / 4, 1 / 4),
    ],
)
def test_gpu_class(need: float, cards: list[int], smallest: float, share: float) -> None:
    assert gpu_class(need, [Node(8, 1, 0, card * GB) for card in cards], smallest) == share


def machine(cpus: float, memory: int, gpus: float = 0, gpu_memory: int = 0) -> Cluster:
    return Cluster(cpus, gpus, nodes=(Node(cpus, gpus, memory, gpu_memory),))


def test_64_cores_and_8_gb_do_not_start_64_trials() -> None:
    cluster = machine(64, 8 * GB)
    resources = trial_resources(cluster, None, None, 1)
    slots = concurrency(cluster, resources, None)
    assert slots == 16, "shares of 1/16, the smallest that holds a process"
    assert slots * PROCESS <= 8 * GB
    assert shared_slots(cluster, [resources, resources], None) == {"cpu": 16}
    assert concurrency(cluster, resources, 3) == 3
    assert concurrency(machine(64, 256 * GB), resources, None) == 64
    assert concurrency(machine(2, 100_000_000), resources, None) == 1


@pytest.mark.parametrize(
    ("cluster", "flags", "resources", "packed", "slots"),
    [
        (machine(16, 64 * GB, 1, 80 * GB), (None, None, 1), Resources(1, 1 / 8), True, 8),
        (machine(6, 64 * GB, 1, 80 * GB), (None, None, 1), Resources(1, 1 / 4), True, 4),
        (machine(2, 64 * GB, 1, 80 * GB), (None, None, 1), Resources(1, 1 / 2), True, 2),
        (machine(16, 64 * GB, 1, 80 * GB), (2, None, 1), Resources(2, 1 / 8), True, 8),
        (machine(16, 64 * GB, 1, 80 * GB), (None, 0.3, 1), Resources(1, 0.3), False, 3),
        (machine(16, 64 * GB, 2, 80 * GB), (None, None, 2), Resources(1, 1, 2), False, 1),
        (machine(16, 64 * GB, 1, 80 * GB), (None, None, 1, False), Resources(1, 1 / 4), False, 4),
        (machine(16, 64 * GB, 1, 0), (None, None, 1), Resources(1, 1 / 4), False, 4),  # who knows what the card has
        (machine(16, 64 * GB, 1, 80 * GB), (None, 0.0, 1), Resources(1), True, 16),
        (machine(16, 64 * GB), (None, None, 1), Resources(1), True, 16),
        (machine(16, 64 * GB), (2, None, 1), Resources(2), False, 8),
        (Cluster(16, 0), (None, None, 1), Resources(1), False, 16),
    ],
)
def test_what_the_user_says_counts_and_the_rest_is_packed(
    cluster: Cluster, flags: tuple, resources: Resources, packed: bool, slots: int
) -> None:
    found = trial_resources(cluster, *flags)
    assert found == resources
    assert found.packed == packed
    assert concurrency(cluster, found, None) == slots


def test_what_a_cluster_cannot_give_is_refused() -> None:
    with pytest.raises(UserError, match=r"asks for 1 GPUs.*has 0"):
        trial_resources(machine(4, GB), None, 1.0, 1)


def data_of(rows: int = 64) -> StudyData:
    spec = TableSpec(TaskType.BINARY, 4, (3,), 2)
    x_num, x_cat = np.zeros((rows, 4), np.float32), np.zeros((rows, 1), np.int64)
    table = Table(x_num, x_cat, np.arange(rows) % 2)
    return StudyData(spec, table, table, {}, 1.0)


def placement(
    nodes: list[Node],
    resources: Resources = Resources(packed=True),
    model: str = "mlp",
    trainer: str = "auto",
    rows: int = 64,
) -> Placement:
    settings = TrialSettings(model, "auc", 3, 0, resources, trainer, "", None)
    return Placement(settings, data_of(rows), nodes)


WIDE: Params = {"model": {"n_blocks": 3, "d_block": 2048}, "train": {"batch_size": 32}}
NARROW: Params = {"model": {"n_blocks": 1, "d_block": 8}, "train": {"batch_size": 32}}


def test_need_is_the_predicted_step_with_a_margin_and_the_process() -> None:
    from bishop_ray.models.cost import training_cost, validation_memory

    data = data_of()
    table = 2 * (data.train.x_num.nbytes + data.train.x_cat.nbytes + data.train.y.nbytes)
    step = training_cost("mlp", data.spec, WIDE["model"], 32).memory
    need = placement([Node(2, memory=64 * GB)]).need(WIDE)
    assert need.whole == need.least == pytest.approx(PROCESS + table + SAFETY * step)
    assert need.what == "a step of 32 rows"
    on_gpu = placement([Node(2, 1, GB, 64 * GB)], Resources(1, 0.5, packed=True)).need(WIDE)
    assert on_gpu.whole == pytest.approx(CONTEXT + table + SAFETY * step)
    # A batch never has more rows than the table, and workers share it.
    many = placement([Node(2, memory=64 * GB)]).need({**WIDE, "train": {"batch_size": 4096}})
    assert many.what == "a step of 64 rows"
    shared = placement([Node(2, memory=64 * GB)], Resources(1, 0, 2)).need(WIDE)
    assert shared.what == "a step of 16 rows"
    # One row at a time, and then many validation rows at once: these take more.
    one = placement([Node(2, memory=64 * GB)], rows=2000).need({**NARROW, "train": {"batch_size": 1}})
    assert one.what == "a validation pass of 1024 rows"
    seen = validation_memory("mlp", data.spec, NARROW["model"], 1024)
    assert one.whole == pytest.approx(PROCESS + table / 64 * 2000 + SAFETY * seen)
    trees = placement([Node(2, memory=64 * GB)], model="lightgbm").need({"model": {}, "train": {}})
    assert trees.whole == PROCESS + LIBRARY + (1 + COPIES) * table


def test_points_that_differ_in_dropout_only_are_predicted_once() -> None:
    from bishop_ray.models import cost

    known = placement([Node(2, memory=64 * GB)], model="ft_transformer")
    points: list[Params] = [{"model": {"ffn_dropout": rate}, "train": {}} for rate in (0.1, 0.35, 0.2)]
    needs = [known.need(point).whole for point in points[:1]]
    before = cost._training_cost.cache_info().misses
    needs += [known.need(point).whole for point in points[1:]]
    assert cost._training_cost.cache_info().misses == before
    direct = cost.memory("ft_transformer", data_of().spec, {"ffn_dropout": 0.35}, 32)
    assert needs == [needs[0]] * 3
    assert needs[0] >= PROCESS + SAFETY * direct


def test_small_points_share_and_large_ones_get_all() -> None:
    narrow, wide = (placement([Node(2, memory=64 * GB)]).need(p).whole for p in (NARROW, WIDE))
    assert wide > 1.3 * narrow
    on_cpus = placement([Node(4, memory=int(4.2 * narrow))])
    assert on_cpus.of(NARROW) == ResourceRequest(1, 0, int(4.2 * narrow / 4))
    assert on_cpus.of(WIDE) == ResourceRequest(1, 0, int(4.2 * narrow / 2))
    alone = placement([Node(4, memory=int(1.1 * wide))])
    assert alone.of(WIDE) == ResourceRequest(1, 0, int(1.1 * wide))
    assert on_cpus.at_a_time(on_cpus.of(NARROW), 9) == 4
    assert on_cpus.at_a_time(on_cpus.of(WIDE), 9) == 2
    assert on_cpus.at_a_time(on_cpus.of(WIDE), 1) == 1

    more = CONTEXT - PROCESS
    card = placement([Node(8, 1, GB, int(8.1 * (narrow + more)))], Resources(1, 1 / 8, packed=True))
    assert card.of(NARROW) == ResourceRequest(1, 1 / 8)
    assert card.of(WIDE) == ResourceRequest(1, 1 / 4)
    explicit = placement([Node(8, 1, GB, int(8.1 * (narrow + more)))], Resources(1, 0.3))
    assert explicit.of(WIDE) == ResourceRequest(1, 0.3)
    assert placement([]).of(WIDE) == ResourceRequest(1), "nothing known of the nodes, nothing predicted"
    unbuildable: Params = {"model": {"d_block": -1}, "train": {}}
    assert on_cpus.of(unbuildable) == on_cpus.of(NARROW), "its trial fails and tells why"


@pytest.mark.parametrize("resources", [Resources(packed=True), Resources(1), Resources(1, 0, 2)])
def test_what_fits_nowhere_is_refused_with_its_size(resources: Resources) -> None:
    wide = placement([Node(2, memory=64 * GB)], resources).need(WIDE)
    nodes = [Node(2, memory=wide.least // 4), Node(4, memory=int(0.5 * wide.least))]
    found = placement(nodes, resources).of(WIDE)
    rows = 32 // resources.workers
    assert isinstance(found, TooLarge)
    assert found.reason == (
        f"predicted {wide.whole / 1e9:.1f} GB for a step of {rows} rows; "
        f"the largest node has {0.5 * wide.least / 1e9:.1f} GB"
    )
    larger = [*nodes, Node(0, memory=64 * GB)]
    assert isinstance(placement(larger, resources).of(WIDE), TooLarge), "a node without CPUs takes no trial"
    assert isinstance(placement([*nodes, Node(1, memory=64 * GB)], resources).of(WIDE), ResourceRequest)


def test_a_batch_that_fits_in_parts_is_tried() -> None:
    params: Params = {"model": {}, "train": {"batch_size": 64}}
    resources = Resources(1, 0.5, packed=True)
    need = placement([Node(2, 1, GB, 64 * GB)], resources, "ft_transformer").need(params)
    tight = placement([Node(2, 1, GB, int(need.whole) - 1)], resources, "ft_transformer")
    assert tight.need(params).least < need.whole
    assert tight.of(params) == ResourceRequest(1, 1.0)
    tighter = placement([Node(2, 1, GB, int(tight.need(params).least) - 1)], resources, "ft_transformer")
    assert isinstance(tighter.of(params), TooLarge)


def test_worker_groups_hold_what_they_held() -> None:
    assert placement([Node(2, memory=64 * GB)], Resources(1, 0, 2)).of(WIDE).bundle() == {"CPU": 0.01}
    assert placement([Node(2, memory=64 * GB)], Resources(1), trainer="ray").of(WIDE).bundle() == {"CPU": 0.01}
    assert placement([Node(2, memory=64 * GB)], Resources(1), trainer="ray").again(WIDE) == ResourceRequest(1)


Refused = list[tuple[str, int, str]]


def searcher(
    sizes: Callable[[Params], ResourceRequest | TooLarge],
    total: int,
    slots: int,
    nodes: tuple[Node, ...] = (Node(4, memory=8),),
    seconds: float = 0.0,
) -> tuple[ModelSearcher, optuna.Study, Refused]:
    """One over a study whose first points are the numbers 0 to 9."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="maximize")
    space = SearchSpace("space", "a", {"model.x": Range("int", (0, 999))}, (), "")
    for number in range(min(total, 10)):
        study.enqueue_trial({"model.x": number})
    refused: Refused = []

    def refuse(model: str, number: int, params: Params, reason: str) -> None:
        refused.append((model, number, reason))
        study.tell(number, state=TrialState.FAIL)

    asker = TrialSource(study, space, lambda n: RandomSampler(seed=n))
    found = ModelSearcher(
        {"a": asker},
        {"cpu": SuccessiveHalving(["a"])},
        {"cpu": slots},
        total,
        lambda *_: seconds,
        {"a": sizes},
        nodes,
        refuse,
    )
    return found, study, refused


def test_a_large_point_is_held_back_until_there_is_room_and_nobody_passes_it() -> None:
    sizes = [2, 2, 8, 2, 2]
    asked, study, _ = searcher(lambda p: ResourceRequest(1, 0, sizes[p["model"]["x"]]), total=5, slots=4, seconds=10)
    first = [asked.suggest(name) for name in ("t0", "t1", "t2", "t3")]
    assert [p["number"] for p in first[:2]] == [0, 1]
    assert first[2:] == [None, None], "the third waits, although a slot is free"
    assert len(study.trials) - sum(t.state == TrialState.WAITING for t in study.trials) == 3, "it is not asked twice"
    asked.on_trial_complete("t0")
    assert asked.suggest("t2") is None
    asked.on_trial_complete("t1")
    before = time.time()
    large = asked.suggest("t2")
    assert large["number"] == 2
    assert large["bundle"] == {"CPU": 1, "memory": 8}
    assert large["ends"] >= before + 10, "its time begins when it does"
    assert asked.suggest("t3") is None, "all of the memory is its own"
    asked.on_trial_complete("t2")
    rest = [asked.suggest(name) for name in ("t3", "t4", "t5")]
    assert [p["number"] for p in rest[:2]] == [3, 4]
    assert rest[2] == ModelSearcher.FINISHED


def test_what_fits_by_nobodys_count_is_left_to_ray() -> None:
    asked, _, _ = searcher(lambda p: ResourceRequest(99, 0, 99), total=1, slots=4)
    assert asked.suggest("t0")["bundle"] == {"CPU": 99, "memory": 99}


def test_refused_points_count_and_take_no_slot() -> None:
    asked, study, refused = searcher(
        lambda p: TooLarge("no room") if p["model"]["x"] in (0, 2) else ResourceRequest(1, 0, 1), total=4, slots=1
    )
    assert asked.suggest("t0")["number"] == 1
    assert asked.suggest("t1") is None
    asked.on_trial_complete("t0")
    assert asked.suggest("t1")["number"] == 3
    asked.on_trial_complete("t1")
    assert asked.suggest("t2") == ModelSearcher.FINISHED
    assert refused == [("a", 0, "no room"), ("a", 2, "no room")]
    assert [t.state for t in study.trials] == [TrialState.FAIL, TrialState.RUNNING] * 2


@pytest.mark.parametrize(("total", "tried"), [(7, 7), (100_000, GIVE_UP)])
def test_a_search_of_points_that_all_are_too_large_ends(total: int, tried: int) -> None:
    asked, study, refused = searcher(lambda p: TooLarge("no room"), total=total, slots=2)
    found = None
    while found is None:
        found = asked.suggest("t0")
    assert found == ModelSearcher.FINISHED
    assert len(refused) == tried == sum(t.state == TrialState.FAIL for t in study.trials)


# With the real Ray, on a node that is said to have little memory.

MEMORY = 1_000_000_000
MIXED = """# points of three sizes
model:
  n_blocks: 3
  d_block: {choice: [8, 16, 2048, 12288]}
  dropout: {float: [0.0, 0.5]}
train:
  batch_size: 32
first:
"""


@pytest.fixture(scope="module")
def small_ray() -> Iterator[tuple[Node, ...]]:
    import ray

    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    _own_token()
    path = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    ray.init(
        address="local", include_dashboard=False, num_cpus=2, num_gpus=1, _memory=MEMORY, log_to_driver=False,
        runtime_env={"env_vars": path},
    )  # fmt: skip
    yield cluster_nodes()
    ray.shutdown()


def study_of(config: StudyConfig, widths: list[int]) -> StudyConfig:
    space = Path(config.storage).parent / "mixed.yaml"
    points = [f"  - {{model: {{d_block: {width}, dropout: {i / 100}}}}}\n" for i, width in enumerate(widths)]
    space.write_text(MIXED + "".join(points))
    packed = Resources(packed=True)
    return replace(
        config, model="mlp", space=str(space), trials=len(widths), max_epochs=1, resources=packed, scheduler="none"
    )


@pytest.mark.slow
def test_a_mixed_search_shares_processes_and_ends(
    small_ray: tuple[Node, ...], config: StudyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert small_ray == (Node(2.0, 1.0, MEMORY, smallest_gpu()),), "a GPU that is only said to be there has no memory"
    processes: dict[int, int] = {}
    bundles: dict[int, Any] = {}
    running: set[int] = set()
    beside: dict[int, set[int]] = defaultdict(set)
    start, heard, ended = StudyCallback.on_trial_start, StudyCallback.on_trial_result, StudyCallback._ended

    def on_start(self: StudyCallback, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        running.add(trial.config["number"])
        for number in running:
            beside[number] |= running
        bundles[trial.config["number"]] = trial.placement_group_factory.required_resources
        start(self, iteration, trials, trial, **info)

    def on_result(self: StudyCallback, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        processes[trial.config["number"]] = result["pid"]
        heard(self, iteration, trials, trial, result, **info)

    def on_end(self: StudyCallback, trial: Any, *args: Any) -> None:
        running.discard(trial.config["number"])
        ended(self, trial, *args)

    monkeypatch.setattr(StudyCallback, "on_trial_start", on_start)
    monkeypatch.setattr(StudyCallback, "on_trial_result", on_result)
    monkeypatch.setattr(StudyCallback, "_ended", on_end)
    config = study_of(config, [8, 12288, 16, 8, 2048, 16, 8])
    result = run_study(config)
    assert result.trials == {"complete": 6, "failed": 1}
    before, large, after = {0, 2, 3}, 4, {5, 6}
    assert all(bundles[number] == {"CPU": 1.0, "memory": MEMORY / 2} for number in before | after)
    assert bundles[large] == {"CPU": 1.0, "memory": MEMORY}
    assert beside[large] == {large}, "a large trial has the node for itself"
    assert len({processes[number] for number in before}) == 2, "on two CPUs three small trials share two processes"
    assert processes[large] not in {processes[number] for number in before | after}, "another class, another process"

    opened = open_study(replace(config, metric="auc"), load_space(config.space, "mlp"), load(config).fingerprint)
    refused = opened.study.trials[1]
    assert refused.state == TrialState.FAIL
    assert "GB for a step of 32 rows; the largest node has 1.0 GB" in refused.user_attrs["reason"]
    assert refused.user_attrs["seconds"] < 1
    runs = runs_frame(config.tracking_uri, "iris")
    assert (runs["status"] == "FAILED").sum() == 1
    assert not (runs["status"] == "RUNNING").any()


@pytest.mark.slow
def test_a_search_without_room_for_any_point_says_so(small_ray: tuple[Node, ...], config: StudyConfig) -> None:
    hopeless = study_of(config, [12288, 12288])
    space = Path(hopeless.space)
    space.write_text(space.read_text().replace("[8, 16, 2048, 12288]", "[12288]"))
    with pytest.raises(StudyFailed, match=r"no trial gave a score: predicted .* GB for a step of 32 rows"):
        run_study(hopeless)
    assert (runs_frame(config.tracking_uri, "iris")["status"] == "FAILED").sum() == 3, "two trials and their study"
