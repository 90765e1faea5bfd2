"""Progress of a run, built from its event stream: steps with their text, calls, output and results."""

import json

from toolcrew.contract.run_events import EventsMissed, EventsOmitted, RunEnded, RunResumed, parse_event
from toolcrew.orchestrator.traces.steps import RunStep, RunSteps


class RunProgress:
    """Steps of a run so far, and which of them changed since the last `take_changed`."""

    def __init__(self) -> None:
        self._steps = RunSteps()
        self.notes: list[str] = []
        self.is_ended = False
        self._changed: dict[str, RunStep] = {}

    @property
    def steps(self) -> dict[str, RunStep]:
        """Return the steps by their ids."""
        return self._steps.steps

    def take_changed(self) -> list[RunStep]:
        """Return the changed steps and reset the list of changes."""
        changed = [step for step in self._changed.values() if step.id in self.steps]
        self._changed = {}
        return changed

    def add(self, text: str) -> None:
        """Add one event of the stream. An event of an unknown type, from a later release, changes nothing."""
        data = json.loads(text)
        try:
            event = parse_event(data)
        except ValueError:
            # The stream keeps only the type of an event that is too large.
            self.notes.append(f"A {data.get('type')} event was too large for the stream. The transcript has it.")
            return
        match event:
            case None:
                return
            case RunResumed():
                self._steps.void(event.attempt, event.step)
                self.notes.append(f"Another orchestrator continued the run from step {event.step}.")
            case EventsMissed():
                self.notes.append("Earlier events are no longer stored. The transcript has them.")
            case EventsOmitted():
                self.notes.append(
                    f"{event.count} pieces of text or output were not stored while Redis did not answer. The "
                    "transcript has them."
                )
            case RunEnded():
                self.is_ended = True
                open_steps = {step.id: step for step in self.steps.values() if not step.is_over}
                for step in open_steps.values():
                    step.is_over = True
                self._changed |= open_steps
            case _ if (changed := self._steps.add(event, is_cut=bool(data.get("is_cut")))) is not None:
                self._changed[changed.id] = changed
