"""The arguments of one evaluation, checked before anything else happens."""

from typing import cast

from fumehood.client.budget import Budget, BudgetTracker
from fumehood.client.dbc import require
from fumehood.client.deadlines import Deadline
from fumehood.client.prompt._types import SupportsDataclass
from fumehood.client.prompt.prompt import Prompt
from fumehood.client.resources import Resources
from fumehood.client.runtime.events import EventBus
from fumehood.client.runtime.session import Session, SessionProtocol
from fumehood.client.type_validation import require_type, shorten_repr


class EvaluationArguments[Out]:
    """tracker: of the budget, if there is one. deadline: the earlier of the call's and the budget's."""

    def __init__(
        self,
        prompt: Prompt[Out],
        params: tuple[SupportsDataclass, ...],
        session: SessionProtocol | None,
        bus: EventBus | None,
        parse_output: bool,
        deadline: Deadline | None,
        budget: Budget | None,
        budget_tracker: BudgetTracker | None,
        resources: Resources | None,
    ) -> None:
        require(
            isinstance(cast(object, prompt), Prompt),
            f"{shorten_repr(prompt)} is no prompt; of a template, make Prompt(template).",
        )
        require(
            isinstance(cast(object, deadline), Deadline | None),
            f"deadline is {shorten_repr(deadline)}; in five seconds is Deadline.after(5).",
        )
        require(
            isinstance(cast(object, budget), Budget | None),
            f"budget is {shorten_repr(budget)}; so many tokens in all are Budget(max_total_tokens=…).",
        )
        require_type(session, SessionProtocol | None, "session")
        require_type(bus, EventBus | None, "bus")
        require_type(budget_tracker, BudgetTracker | None, "budget_tracker")
        require_type(resources, Resources | None, "resources")
        require_type(parse_output, bool, "parse_output")
        require(
            budget is None or budget_tracker is None,
            "budget and budget_tracker exclude each other; give one.",
        )
        self.prompt = prompt
        self.params = params
        self.session: SessionProtocol = Session() if session is None else session
        self.bus = bus
        self.parse_output = parse_output
        self.tracker = budget_tracker or (BudgetTracker(budget) if budget else None)
        self.deadline = _earliest_deadline(deadline, self.tracker.budget.deadline if self.tracker else None)
        self.resources = resources


def _earliest_deadline(*deadlines: Deadline | None) -> Deadline | None:
    return min((one for one in deadlines if one is not None), key=lambda one: one.expires_at, default=None)
