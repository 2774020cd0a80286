"""How it reads that a stage is given to a spare that is faster."""

from __future__ import annotations

from typing import assert_never

from protomodels_cli.coordinator import reasons as r
from protomodels_cli.coordinator import reseat_notices as reseat
from protomodels_cli.quantities import duration


def about_reseating(notice: reseat.AboutReseating) -> str:
    match notice:
        case reseat.StageReseating(step, seconds, why):
            pause = f"the run pauses after step {step} for about {duration(seconds)}"
            return f"re-seating stage {why.stage} from {why.holder} to {why.spare}: {faster(why)}; {pause}"
        case reseat.StageReseated(stage, _, name, _, before):
            return f"re-seated stage {stage} from {before} to {name}; {before} is a spare now"
        case reseat.StageNotReseated(stage, _, holder, _, spare, why_not):
            causes = {
                "spare_gone": f"{spare} is gone",
                "spare_needed": f"{spare} is needed for another stage",
                "not_ready": f"{spare} did not build the stage in time",
                "not_saved": "the snapshot was not saved in time",
            }
            return f"stage {stage} stays with {holder}: {causes[why_not]}; nothing is redone"
        case _:
            assert_never(notice)


def faster(why: r.Reseating) -> str:
    return f"steps should take {duration(why.expected_seconds)} instead of {duration(why.step_seconds)}"
