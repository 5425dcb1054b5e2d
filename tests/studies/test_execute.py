"""The executor and lost workers, without a cluster."""

from __future__ import annotations

import contextlib
import cProfile
import io
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pclmix.cluster.engine import ClusterOptions, LostError, Node, Resources
from pclmix.errors import PclmixError
from pclmix.studies import execute, work
from pclmix.studies.plan import EVALUATION, PREDICTIONS, Record, Run, Settings, Study
from pclmix.studies.work import Order

RUNS = [Run(f"fold{fold}", fold, Settings("pce", "tiny")) for fold in (1, 2, 3)]
Answer = Callable[[Order], Record]


class Fake:
    """A cluster of one node whose tasks end at once as `answer` says."""

    here, address = "0", "10.0.0.1:6379"

    def __init__(self, answer: Answer) -> None:
        self.answer, self.orders = answer, list[Order]()

    def nodes(self) -> list[Node]:
        return [Node("0", "host", "10.0.0.1", 2, 0)]

    def resources(self, *_: Any) -> Resources:
        return Resources(1)

    def require_ready(self, paths: list[Path]) -> None:
        self.asked = paths

    def actor(self, *_: Any, **__: Any) -> None:
        return

    def submit(self, _: Any, order: Order, *__: Any, **___: Any) -> int:
        self.orders.append(order)
        return len(self.orders) - 1

    def ready(self, refs: list[int], _: float) -> list[int]:
        return refs[:1]

    def get(self, ref: int) -> Record:
        return self.answer(self.orders[ref])


def go(study: Path, dataset: Path, answer: Answer, runs: list[Run] = RUNS) -> tuple[dict[str, str], Fake, str]:
    fake, shown = Fake(answer), io.StringIO()
    console = Console(file=shown, width=200)
    driver = execute._OnCluster(
        Study(study / "study", "crossval", dataset, tuple(runs)),
        execute.ANY,
        ClusterOptions("auto"),
        fake,
        console,  # type: ignore[arg-type]
    )
    return driver.execute(runs, execute._files_of(runs)), fake, shown.getvalue()


def finished(order: Order) -> Record:
    return Record("finished", "host", "10.0.0.1", "cpu", 1, 1, 0.0, 1.0, order.attempt)


def test_lost_run_is_retried_then_fails(phantom_dataset: Path, tmp_path: Path) -> None:
    def answer(order: Order) -> Record:
        if order.run.fold == 2 or (order.run.fold == 1 and order.attempt < 3):
            raise LostError("the node was lost")
        return finished(order)

    failed, fake, shown = go(tmp_path, phantom_dataset, answer)
    attempts = [(order.run.fold, order.attempt) for order in fake.orders]
    assert sorted(attempts) == [(1, 1), (1, 2), (1, 3), *((2, n + 1) for n in range(execute.ATTEMPTS)), (3, 1)]
    assert list(failed) == ["fold 2"]
    assert "the node was lost" in failed["fold 2"]
    assert "fold 3: finished on host (10.0.0.1)" in shown


def test_failing_node_fails_only_its_run(phantom_dataset: Path, tmp_path: Path) -> None:
    def answer(order: Order) -> Record:
        if order.run.fold == 1:
            raise PclmixError("node host (10.0.0.1): no space")
        return finished(order)

    failed, _, _ = go(tmp_path, phantom_dataset, answer)
    assert failed == {"fold 1": "node host (10.0.0.1): no space"}


def test_brackets_in_the_name_of_a_run_are_shown(
    phantom_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "perform", lambda order, *_: finished(order))
    run, shown = Run("a/fold1", 1, Settings("pce", "tiny"), "weights=/w[/x].pth"), io.StringIO()
    study = Study(tmp_path / "cv", "sweep", phantom_dataset, (run,))
    console = Console(file=shown, width=100)
    assert execute.execute(study, [run], execute.ANY, ClusterOptions(None), console) == {}
    assert "weights=/w[/x].pth, fold 1" in shown.getvalue()


def test_files_outside_the_dataset_are_listed(phantom_dataset: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("net: resnet10\n")
    run = Run("fold1", 1, Settings("pce", str(recipe), ("encoder.weights=/weights/w.pth",)))
    _, fake, _ = go(tmp_path, phantom_dataset, finished, [run])
    assert fake.asked == [recipe, Path("/weights/w.pth")]


def test_a_task_is_sent_its_own_run_only(phantom_dataset: Path, tmp_path: Path) -> None:
    runs = [Run(f"seed{seed}/fold1", 1, Settings("pce", "tiny", (f"seed={seed}",))) for seed in range(50)]
    _, fake, _ = go(tmp_path, phantom_dataset, finished, runs)
    assert [order.run for order in fake.orders] == runs
    assert all(len(pickle.dumps(order)) < 2000 for order in fake.orders), "as large as the study"


def calls(study: Path, dataset: Path, count: int, console: Console) -> int:
    """Function calls of a driver with so many runs, whose clock advances by 10 ms for each of them."""
    runs = [Run(f"seed={k}/fold1", 1, Settings("pce", "tiny", (f"seed={k}",)), f"seed={k}") for k in range(count)]
    fake = Fake(finished)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "connect", lambda _: contextlib.nullcontext(fake))
        patch.setattr("pclmix.studies.status.time.monotonic", lambda: 100 + len(fake.orders) / 100)
        profile = cProfile.Profile()
        of = Study(study / f"study{count}", "sweep", dataset, tuple(runs))
        assert profile.runcall(execute.execute, of, runs, execute.ANY, ClusterOptions("auto"), console) == {}
    assert len(fake.orders) == count
    return sum(entry.callcount for entry in profile.getstats())


def test_work_for_a_run_does_not_grow_with_their_number(phantom_dataset: Path, tmp_path: Path) -> None:
    """Counted, not timed. Not even on a terminal, where a table shows all runs."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30)
    calls(tmp_path, phantom_dataset, 5, console)  # reads the recipe, imports modules
    few, many = (calls(tmp_path, phantom_dataset, count, console) / count for count in (100, 400))
    assert many < 1.1 * few
    assert many < 10_000


def test_a_node_recognises_a_study_without_reading_its_runs(phantom_dataset: Path, tmp_path: Path) -> None:
    study = Study(tmp_path / "cv", "crossval", phantom_dataset, tuple(RUNS)).begin()
    (study.folder / "study.json").write_text("as long as there are runs")
    assert work._is_here(study)
    assert not work._is_here(replace(study, id="of another folder with this name"))
    assert not work._is_here(replace(study, folder=tmp_path / "nowhere"))


def test_leftovers_of_a_killed_study_are_removed(phantom_dataset: Path, tmp_path: Path) -> None:
    """Also those of a run that was killed while it predicted, and is done since."""
    study = Study(tmp_path / "cv", "crossval", phantom_dataset, tuple(RUNS[:1])).begin()
    place = study.place(RUNS[0])
    old, young = [], []
    for folder, name in ((study.folder, "cases.csv"), (place, "cases.csv"), (place / PREDICTIONS, "a.nii.gz")):
        folder.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text("whole")
        stem, _, ending = name.partition(".")
        for kind, letters in ((old, "abcdefgh"), (young, "ijklmnop")):
            kind.append(folder / f".{stem}-{letters}.{ending}")
            kind[-1].write_text("half")
    for path in old:
        os.utime(path, (time.time() - 7200,) * 2)
    (place / EVALUATION).write_text("{}")
    assert execute.execute(study, RUNS[:1], execute.ANY, ClusterOptions(None), Console(quiet=True)) == {}
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in young), "another process may be writing them"


@pytest.mark.parametrize(
    "settings", [Settings("pce", "mine.yaml"), Settings("pce", "tiny", ("encoder.weights=w.pth",))]
)
def test_relative_paths_are_refused_on_a_cluster(
    phantom_dataset: Path, tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("net: resnet10\n")
    run = Run("fold1", 1, settings)
    study = Study(tmp_path / "cv", "crossval", phantom_dataset, (run,))
    with pytest.raises(PclmixError) as caught:
        execute.execute(study, [run], execute.ANY, ClusterOptions("127.0.0.1:1"), Console(quiet=True))
    assert "mine.yaml" in str(caught.value) or "w.pth" in str(caught.value)
