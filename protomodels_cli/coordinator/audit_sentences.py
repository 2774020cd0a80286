"""How audits read."""

from __future__ import annotations

from typing import assert_never

from protomodels_cli.coordinator import audit_notices as audit
from protomodels_cli.coordinator.audit_reasons import AuditFailed, FalseVerdicts, MessagesDiffer
from protomodels_cli.quantities import plural

GIVEN_UP = {
    "no_spare": "no spare could hold it",
    "no_independent": "every spare that could hold it shares the holder's token or address, or has lied",
    "spares_busy": "all spares that could hold it are building a stage or leaving",
    "not_shown": "a neighbour did not show what it recorded",
    "no_verdict": "no spare came to a result",
}


def about_audits(notice: audit.AboutAudits) -> str:
    match notice:
        case audit.NobodyAudits(share, "no_spare"):
            return f"audit = {share:g}, and no peer is spare: nobody is audited until one joins that could hold a stage"
        case audit.NobodyAudits(share):
            what = f"audit = {share:g}, and every spare shares the holders' token or address, so nobody is audited"
            return f"{what}; give each person a token: `pmtrain token create --for NAME`"
        case audit.StageAudited(stage, step, _, name, auditor):
            return f"audited stage {stage} in step {step}: {name} sent what {auditor} recomputed"
        case audit.StageAccused(_, name, reason):
            return f"{name} is accused: it {lied(reason)}"
        case audit.AuditorsDisagree(_, name, other, reason):
            accuser = " and ".join(reason.auditors)
            return f"{accuser} and {other} disagree on whether {name} lied in step {reason.step}; others are asked"
        case audit.HolderWatched(_, name, reason, words, needed):
            what = f"{name} is watched: it {lied(reason)}"
            fix = f"`pmtrain kick {name}` dismisses it now"
            return f"{what}; {words} of {needed} people who must contradict it before it is dismissed do; {fix}"
        case audit.AuditGivenUp(stage, step, why):
            return f"stage {stage} was not audited in step {step}: {GIVEN_UP[why]}"
        case _:
            assert_never(notice)


def lied(reason: AuditFailed) -> str:
    """As the end of a sentence about who did."""
    what = "activations" if reason.leg == "forward" else "gradients"
    share = f"{reason.wild:,} of {plural(reason.numbers, 'number')}"
    who = " and ".join(reason.auditors)
    return f"sent false {what} from stage {reason.stage} in step {reason.step} ({share}; recomputed by {who})"


def contradicted(reason: FalseVerdicts) -> str:
    """As the end of a sentence about who was."""
    return (
        f"gave results of audits that {reason.contradicted} of {plural(reason.people, 'person', 'people')} contradict"
    )


def differ(reason: MessagesDiffer) -> str:
    ends = f"stages {reason.boundary} and {reason.boundary + 1}"
    return f"{ends} report different messages of step {reason.step}"
