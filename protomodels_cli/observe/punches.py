"""Why a link is not punched, in words: for both programs."""

from __future__ import annotations

from protomodels_cli.wire.path import OF_BOTH


def not_punched(why: str, here: str, there: str) -> str:
    """`here`, `there`: what to call the end that says so, and the other."""
    what, _, side = (why, "", "") if why in OF_BOTH else why.rpartition("_")
    who = here if side == "here" else there
    return {
        "not_listening": f"{who} is not to be dialled (--no-listen)",
        "not_seen": f"nobody outside has said where {who} is seen",
        "port_changes": f"the router of {who} gives every connection another port",
        "other_address": f"{who} is seen at an address that the coordinator does not know it by",
        "no_answer": f"{there} did not say in time where it is seen",
        "not_opened": "both ends have tried to connect at the same moment, and nothing came through",
    }[what]
