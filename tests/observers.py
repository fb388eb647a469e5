"""An observer that remembers what it is told."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from qdqtune.tuning.observer import Silent, State
from qdqtune.types import Trial


@dataclass
class Log(Silent):
    stages: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trials: list[tuple[Trial, str, State]] = field(default_factory=list)

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def trial(self, trial: Trial, verdict: str, state: State) -> None:
        self.trials.append((trial, verdict, state))


class When(Silent):
    """Does something when so many candidates are known."""

    def __init__(self, acts: Mapping[int, Callable[[], object]]) -> None:
        self.acts = acts

    def trial(self, trial: Trial, outcome: str, state: State) -> None:
        self.acts.get(trial.number, lambda: None)()
