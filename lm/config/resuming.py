"""Markers on the fields of the schema: whether a resumed run may change their values."""

from __future__ import annotations

from enum import Enum

from pydantic import BaseModel

from lm.config.messages import subsection


class Resume(Enum):
    """Whether a resumed run accepts another value of a field.

    A field without a marker follows the rule of its section.
    """

    FIXED = "refused: shapes of weights, order of the data, settings that saved states override"
    NOTED = "accepted with a note: training continues differently"
    FREE = "accepted: trained weights do not depend on it"


# Markers for the fields of the schema: `seed: Annotated[int, FIXED_ON_RESUME]`.
FIXED_ON_RESUME, NOTED_ON_RESUME, FREE_ON_RESUME = Resume.FIXED, Resume.NOTED, Resume.FREE


def resume_rule(schema: type[BaseModel], key: str) -> Resume:
    """Return the rule for a dotted key; keys inside a mapping follow the rule of the mapping.

    Raises:
        KeyError: If there is no such key, or it has no rule.
    """
    rule: Resume | None = None
    section = schema
    for name in key.split("."):
        field = section.model_fields[name]
        markers = [marker for marker in field.metadata if isinstance(marker, Resume)]
        rule = markers[0] if markers else rule
        inner_section = subsection(field)
        if inner_section is None:
            break
        section = inner_section
    if rule is None:
        raise KeyError(f"{key} has no rule for resumed runs")
    return rule
