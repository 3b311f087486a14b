"""Who gets the next trial: the race by itself, and with real studies whose trials are a table of scores."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.samplers import TPESampler
from optuna.trial import TrialState

from bishop_ray.config import Resources
from bishop_ray.search.allocation import Budget, Standing, SuccessiveHalving
from bishop_ray.search.cluster import Cluster, shared_slots
from bishop_ray.search.parameters import Range
from bishop_ray.search.searcher import ModelSearcher, TrialSource
from bishop_ray.search.space import SearchSpace


def standing(name: str, started: int = 0, best: float = -math.inf, **more: Any) -> Standing:
    found = {"interrupted": 0, "running": 0, "searchable": True} | more
    return Standing(name=name, started=started, best=best, **found)


@dataclass
class World:
    """Studies in memory, and how long, how good and how reliable trials of each model are.

    Attributes:
        skill: Model -> what its scores are about; the order is the order of the race.
        seconds: Model -> seconds of a trial, 1 where nothing is said.
        constant: Models with nothing to search.
        failing: Models whose every trial fails.
        kinds: Kind of slot -> its models.
        slots: Kind of slot -> trials at a time.
    """

    skill: Mapping[str, float]
    folder: Path
    seconds: Mapping[str, float] = field(default_factory=dict)
    constant: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()
    kinds: Mapping[str, list[str]] = field(default_factory=dict)
    slots: Mapping[str, int] = field(default_factory=lambda: {"cpu": 1})

    def __post_init__(self) -> None:
        self.kinds = self.kinds or {"cpu": list(self.skill)}
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.spaces = {name: _space(name, name in self.constant) for name in self.skill}
        self.studies = {name: optuna.create_study(direction="maximize") for name in self.skill}
        for name, study in self.studies.items():
            for point, _ in self.spaces[name].queue():
                study.enqueue_trial(point)
        self.rounds: list[tuple[int, list[str]]] = []

    def run(self, total: int, killed_after: int = 1_000_000) -> list[tuple[str, int, str]]:
        """Runs until `total` trials exist, or is killed; (model, number, parameters) in the order of their starts.

        Args:
            total: Trials.
            killed_after: Ended trials in this run, after which whatever runs is left as it is.
        """
        askers = {
            name: TrialSource(study, self.spaces[name], lambda n: TPESampler(seed=n, n_startup_trials=4))
            for name, study in self.studies.items()
        }
        races = {
            kind: SuccessiveHalving(names, self.folder / f"race-{kind}.json", self._note)
            for kind, names in self.kinds.items()
        }
        searcher = ModelSearcher(askers, races, self.slots, total, lambda *_: 0.0)
        log: list[tuple[str, int, str]] = []
        live: list[tuple[float, int, str, dict[str, Any]]] = []
        clock, ids = 0.0, itertools.count()
        self.most = Counter[str]()
        for ended in itertools.count():
            while isinstance(point := searcher.suggest(trial_id := str(next(ids))), dict):
                log.append((point["model"], point["number"], str(point["params"])))
                length = self.seconds.get(point["model"], 1.0)
                heapq.heappush(live, (clock + length, int(trial_id), trial_id, point))
                for kind, names in self.kinds.items():
                    self.most[kind] = max(self.most[kind], sum(p["model"] in names for *_, p in live))
            if not live:
                assert point == ModelSearcher.FINISHED
                return log
            if ended == killed_after:
                return log
            clock, _, trial_id, point = heapq.heappop(live)
            self._end(point)
            searcher.on_trial_complete(trial_id)
        raise AssertionError

    def _end(self, point: dict[str, Any]) -> None:
        study, number = self.studies[point["model"]], point["number"]
        if point["model"] in self.failing:
            study.tell(number, state=TrialState.FAIL)
            return
        # A hill around 0.7; every fourth trial is stopped early and keeps its last report.
        score = self.skill[point["model"]] - abs(point["params"]["model"].get("x", 0.7) - 0.7)
        if number % 4 == 3:
            optuna.trial.Trial(study, study.get_trials(deepcopy=False)[number]._trial_id).report(score - 1, 1)
            study.tell(number, state=TrialState.PRUNED)
        else:
            study.tell(number, score)

    def _note(self, number: int, names: Any) -> None:
        self.rounds.append((number, list(names)))

    @property
    def counts(self) -> dict[str, int]:
        """Trials begun by model."""
        return {
            name: sum(t.state != TrialState.WAITING for t in study.get_trials(deepcopy=False))
            for name, study in self.studies.items()
        }


def _space(name: str, constant: bool) -> SearchSpace:
    if constant:
        return SearchSpace(name, name, {"model.d": 8}, (), "")
    entries = {"model.x": Range("float", (0.0, 1.0)), "model.kind": Range("choice", ("a", "b")), "model.d": 8}
    return SearchSpace(name, name, entries, ({"model.x": 0.1, "model.kind": "a"},), "")


def models(*skills: float) -> dict[str, float]:
    return dict(zip("abcdefghijklmnopqrst"[: len(skills)], skills, strict=True))


def test_defaults_come_first_in_the_given_order_then_rounds_double(tmp_path: Path) -> None:
    world = World(models(0.1, 0.5, 0.3, 0.9, 0.2), tmp_path)
    log = world.run(5 + 3 * 2 + 2 * 4 + 2 * 8)
    assert [name for name, *_ in log[:5]] == ["a", "b", "c", "d", "e"]
    assert all("'x': 0.1" in params for *_, params in log[:5]), "the default configuration is each model's first trial"
    # Five models: the better three get two more, of these two get four more, then eight, and so on.
    assert world.rounds == [(1, ["b", "c", "d"]), (2, ["b", "d"]), (3, ["b", "d"])]
    assert [name for name, *_ in log[5:11]] == ["b", "c", "d"] * 2, "in turn"
    assert world.counts == {"a": 1, "b": 15, "c": 3, "d": 15, "e": 1}


def test_the_last_two_race_to_the_end(tmp_path: Path) -> None:
    world = World(models(0.1, 0.9), tmp_path)
    world.run(30)
    assert world.counts == {"a": 15, "b": 15}
    assert len(world.rounds) == 3


def test_ties_go_to_the_earlier_model() -> None:
    race = SuccessiveHalving(["a", "b", "c", "d"])
    assert race.next([standing(name, 1, 0.5) for name in "abcd"]) == "a"
    assert race.survivors == ["a", "b"]


def test_one_model_is_a_plain_search(tmp_path: Path) -> None:
    world = World(models(0.5), tmp_path)
    assert [number for _, number, _ in world.run(9)] == list(range(9))


def test_interrupted_trials_go_on_before_anything_else() -> None:
    race = SuccessiveHalving(["a", "b", "c"])
    table = [standing("a"), standing("b", 1, 0.5), standing("c", 3, 0.4, interrupted=1)]
    assert race.next(table) == "c"
    assert race.next([*table[:2], standing("c", 3, 0.4)]) == "a"


def test_a_model_with_nothing_to_search_gets_its_one_trial(tmp_path: Path) -> None:
    world = World(models(0.9, 0.1, 0.2, 0.3), tmp_path, constant=("a",))
    world.run(21)
    assert world.counts["a"] == 1
    assert sum(world.counts.values()) == 21
    assert world.rounds[0] == (1, ["c", "d"]), "it takes no place in a round"


def test_when_all_are_exhausted_the_search_ends(tmp_path: Path) -> None:
    world = World(models(0.9, 0.1), tmp_path, constant=("a", "b"))
    assert len(world.run(50)) == 2


def test_those_dropped_go_on_when_the_others_cannot() -> None:
    race = SuccessiveHalving(["a", "b", "c", "d"])
    tried = [standing(name, 1, score) for name, score in zip("abcd", (0.1, 0.2, 0.9, 0.8), strict=True)]
    assert race.next(tried) == "c"
    assert race.survivors == ["c", "d"]
    exhausted = [*tried[:2], *(standing(name, 3, 0.9, searchable=False) for name in "cd")]
    assert race.next(exhausted) == "b"


def test_a_model_whose_trials_all_fail_is_dropped(tmp_path: Path) -> None:
    world = World(models(0.9, 0.5), tmp_path, failing=("a",))
    world.run(20)
    assert world.counts == {"a": 1, "b": 19}


def test_when_every_trial_fails_the_search_ends_all_the_same(tmp_path: Path) -> None:
    world = World(models(0.9, 0.5, 0.1), tmp_path, failing=("a", "b", "c"))
    world.run(12)
    assert sum(world.counts.values()) == 12


def test_while_a_slow_default_runs_no_model_takes_the_whole_budget(tmp_path: Path) -> None:
    skills = models(0.1, 0.5, 0.3, 0.9, 0.8, 0.2, 0.7, 0.4)
    world = World(skills, tmp_path, seconds={"h": 1000.0}, slots={"cpu": 2})
    log = world.run(40)
    assert {name for name, *_ in log[:8]} == set(skills)
    assert sum(world.counts.values()) == 40
    best_first = [world.counts[name] for name in "degbcfa"]
    assert best_first == sorted(best_first, reverse=True), "what idles goes to those that lead"
    assert world.counts["d"] < 0.5 * 40, world.counts
    assert not world.rounds, "the round is not over"


@pytest.mark.parametrize("slots", [2, 3, 8])
def test_rounds_end_although_slots_are_always_busy(tmp_path: Path, slots: int) -> None:
    world = World(models(0.1, 0.5, 0.3, 0.9, 0.8, 0.2, 0.7, 0.4), tmp_path, {"d": 1.7, "e": 0.6}, slots={"cpu": slots})
    world.run(60)
    assert [names for _, names in world.rounds[:2]] == [["b", "d", "e", "g"], ["d", "e"]]
    assert min(world.counts["d"], world.counts["e"]) > 15


def test_models_on_cpus_and_gpus_race_side_by_side(tmp_path: Path) -> None:
    skills = models(0.9, 0.1, 0.5, 0.4, 0.3, 0.8)
    kinds, slots = {"cpu": ["a", "b", "c"], "gpu": ["d", "e", "f"]}, {"cpu": 2, "gpu": 3}
    world = World(skills, tmp_path, seconds=dict.fromkeys("def", 3.0), kinds=kinds, slots=slots)
    log = world.run(60)
    assert len(log) == 60
    assert world.most == Counter(cpu=2, gpu=3), "no slot idles, none is used twice"
    assert world.counts["a"] > world.counts["b"]
    assert world.counts["f"] > world.counts["e"]
    assert (tmp_path / "race-cpu.json").is_file()
    assert (tmp_path / "race-gpu.json").is_file()


def test_one_kind_without_anything_to_do_does_not_end_the_other(tmp_path: Path) -> None:
    kinds, slots = {"gpu": ["a"], "cpu": ["b"]}, {"gpu": 1, "cpu": 1}
    world = World(models(0.9, 0.5), tmp_path, {"a": 5.0}, constant=("a",), kinds=kinds, slots=slots)
    world.run(15)
    assert world.counts == {"a": 1, "b": 14}


@pytest.mark.parametrize("killed_after", [0, 1, 3, 6, 7, 8, 13, 20, 33])
def test_a_resumed_search_is_the_undisturbed_one(tmp_path: Path, killed_after: int) -> None:
    skills = models(0.1, 0.5, 0.3, 0.9, 0.55, 0.2, 0.4)
    folders = [tmp_path / name for name in ("whole", "killed")]
    whole, killed = (World(skills, folder, constant=("b",), failing=("d",)) for folder in folders)
    expected = whole.run(36)
    first = killed.run(36, killed_after)
    second = killed.run(36)
    assert first == expected[: killed_after + 1]
    assert second == expected[killed_after:], "the trial that ran goes on, with its own parameters"
    assert killed.rounds == whole.rounds


def test_killed_again_and_again_with_several_slots_no_trial_is_lost_or_doubled(tmp_path: Path) -> None:
    skills = models(0.1, 0.5, 0.3, 0.9, 0.55)
    world = World(skills, tmp_path, seconds={"a": 4.0, "d": 2.5}, slots={"cpu": 3})
    for killed_after in (0, 2, 5, 5, 9):
        world.run(40, killed_after)
    world.run(40)
    assert sum(world.counts.values()) == 40
    states = [t.state for study in world.studies.values() for t in study.get_trials(deepcopy=False)]
    assert TrialState.RUNNING not in states


def test_a_resumed_race_keeps_who_went_on_and_gives_newcomers_one_trial(tmp_path: Path) -> None:
    record = tmp_path / "race.json"
    race = SuccessiveHalving(["a", "b", "c", "d"], record)
    race.next([standing(name, 1, score) for name, score in zip("abcd", (0.9, 0.1, 0.8, 0.2), strict=True)])
    assert race.survivors == ["a", "c"]
    # By now d would be better than c: the decision that was made stands.
    resumed = SuccessiveHalving(["new", "a", "b", "c", "d"], record)
    assert (resumed.round, resumed.survivors) == (1, ["a", "c"])
    table = [standing("new"), *(standing(name, 1, 0.5) for name in "abcd")]
    assert resumed.next(table) == "new"
    table[0] = standing("new", 1, 0.99)
    assert resumed.next(table) == "a"
    assert resumed.waiting(table) == 2
    others = SuccessiveHalving(["x", "y"], record)
    assert (others.round, others.survivors) == (0, ["x", "y"]), "a record of other models says nothing"


def test_no_further_trial_begins_when_time_is_up(tmp_path: Path) -> None:
    world = World(models(0.5, 0.4), tmp_path)
    askers = {
        name: TrialSource(study, world.spaces[name], lambda n: TPESampler(seed=n))
        for name, study in world.studies.items()
    }
    asked: list[tuple[int, int]] = []

    def limit(race: SuccessiveHalving, waiting: int, slots: int) -> float:
        asked.append((waiting, slots))
        return -1.0 if len(asked) > 1 else 60.0

    searcher = ModelSearcher(askers, {"cpu": SuccessiveHalving(["a", "b"])}, {"cpu": 2}, 10, limit)
    first = searcher.suggest("1")
    assert first["model"] == "a"
    assert first["ends"] > 0
    assert searcher.suggest("2") == ModelSearcher.FINISHED
    assert asked == [(2, 2), (1, 2)], "who waits shares the slots"
    assert world.counts == {"a": 1, "b": 0}, "a trial that may not begin is not asked for"


CPU, GPU = Resources(1), Resources(1, 0.25)


@pytest.mark.parametrize(
    ("cluster", "wanted", "asked", "slots"),
    [
        (Cluster(2, 0), [CPU, CPU], None, {"cpu": 2}),
        (Cluster(16, 1), [GPU, CPU], None, {"gpu": 4, "cpu": 12}),
        (Cluster(16, 1), [CPU, GPU], 3, {"gpu": 2, "cpu": 1}),
        (Cluster(4, 1), [GPU, CPU], None, {"gpu": 3, "cpu": 1}),
        (Cluster(2, 1), [Resources(1, 0.5), CPU], None, {"gpu": 1, "cpu": 1}),
        (Cluster(16, 1), [GPU, CPU], 2, {"gpu": 1, "cpu": 1}),
        (Cluster(16, 4), [Resources(1, 1.0, 2), CPU], None, {"gpu": 2, "cpu": 12}),
        # One model's trials need two CPUs, another's one: as many as fit of the larger ones.
        (Cluster(4, 0), [Resources(1, 0, 2), CPU], None, {"cpu": 2}),
        (Cluster(4, 0), [CPU, Resources(1, 0, 2)], None, {"cpu": 2}),
    ],
)
def test_slots_by_kind(cluster: Cluster, wanted: list[Resources], asked: int | None, slots: dict[str, int]) -> None:
    assert shared_slots(cluster, wanted, asked) == slots


def test_a_time_budget_is_shared_by_those_that_wait() -> None:
    race, refit = SuccessiveHalving(["a", "b", "c", "d"]), [0.0]
    budget = Budget(time.time() + 1000, 4, lambda: refit[0])
    assert budget.ends == pytest.approx(budget.began + 966, abs=0.1)
    assert budget.limit(race, 4, 2) == pytest.approx(966 / 2 * 2 / 4, abs=2), "defaults share a half"
    assert budget.limit(race, 1, 2) == pytest.approx(966, abs=2), "never more than is left"
    race.next([standing(name, 1, 0.5) for name in "abcd"])
    assert budget.limit(race, 2, 1) == pytest.approx(966 / 2, abs=2)
    assert not budget.over()
    refit[0] = 100.0
    assert budget.ends == pytest.approx(budget.began + 866, abs=0.1), "a refit has its time"
    refit[0] = 10_000.0
    assert budget.ends == pytest.approx(budget.began + 500, abs=0.1), "but never more than half of all"
    assert budget.allows(900)
    assert not budget.allows(995)


def test_a_time_budget_ends() -> None:
    race = SuccessiveHalving(["a"])
    budget = Budget(time.time() + 0.5, 1, lambda: 0.0)
    assert budget.limit(race, 1, 1) < 0, "nothing begins that could not report"
    time.sleep(0.5)
    assert budget.over()
    assert not budget.allows(0.0)
    endless = Budget(0.0, 1, lambda: 0.0)
    assert endless.limit(race, 1, 1) == 0.0
    assert not endless.over()
    assert endless.allows(1e9)
