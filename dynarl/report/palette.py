"""Colours and letters of the roles, the same in terminal and picture.

The colours are those of Okabe and Ito (2008), which people with colour blindness can tell apart; every picture that
uses them also has a letter or a legend.
"""

from __future__ import annotations

ROLE_COLOURS = {"rollout": "#0072B2", "inference": "#E69F00", "critic": "#CC79A7", "training": "#009E73"}
ROLE_LETTERS = {"rollout": "R", "inference": "I", "critic": "C", "training": "T"}
NO_ROLE_COLOUR = "#DDDDDD"
CANCELLED_COLOUR = "#D55E00"

STATE_STYLES = {
    "running": "bold green",
    "completed": "bold green",
    "pending": "yellow",
    "requeued": "yellow",
    "unknown": "yellow",
    "cancelled": "bold red",
    "failed": "bold red",
    "lost": "bold red",
}


def role_style(role: str | None, background: bool = False) -> str:
    """Rich style of a role: coloured text, or white (black on orange) on the colour."""
    colour = ROLE_COLOURS.get(role, NO_ROLE_COLOUR)
    if not background:
        return colour
    return f"{'white' if role in ('rollout', 'training') else 'black'} on {colour}"
