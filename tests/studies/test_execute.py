"""What the executor does with runs that lose their workers, without a cluster."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pclmix.cluster.engine import ClusterOptions, LostError, Node, Resources
from pclmix.errors import PclmixError
from pclmix.studies import execute
from pclmix.studies.plan import Record, Run, Settings, Study
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
    return driver.execute(runs), fake, shown.getvalue()


def finished(order: Order) -> Record:
    return Record("finished", "host", "10.0.0.1", "cpu", 1, 1, 0.0, 1.0, order.attempt)


def test_a_lost_run_is_given_again_and_then_given_up(phantom_dataset: Path, tmp_path: Path) -> None:
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


def test_a_node_that_cannot_begin_fails_its_run_alone(phantom_dataset: Path, tmp_path: Path) -> None:
    def answer(order: Order) -> Record:
        if order.run.fold == 1:
            raise PclmixError("node host (10.0.0.1): no space")
        return finished(order)

    failed, _, _ = go(tmp_path, phantom_dataset, answer)
    assert failed == {"fold 1": "node host (10.0.0.1): no space"}


def test_files_besides_the_dataset_are_asked_for(phantom_dataset: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("net: resnet10\n")
    run = Run("fold1", 1, Settings("pce", str(recipe), ("encoder.weights=/weights/w.pth",)))
    _, fake, _ = go(tmp_path, phantom_dataset, finished, [run])
    assert fake.asked == [recipe, Path("/weights/w.pth")]


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
