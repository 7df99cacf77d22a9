"""What a resumed run may change: a marker on the fields of the schema, and how it is read."""

from __future__ import annotations

from enum import Enum

from pydantic import BaseModel

from lm.config.messages import subsection


class Resume(Enum):
    """What a field says of a run that is resumed with another value. A field without a marker has
    that of the section it is in."""

    FIXED = "refused: the weights' shapes, the order of the data, what saved states override"
    NOTED = "taken, and said: training goes on differently"
    FREE = "taken: what was trained does not depend on it"


FIXED, NOTED, FREE = Resume.FIXED, Resume.NOTED, Resume.FREE


def resume_rule(schema: type[BaseModel], key: str) -> Resume:
    """What the schema says of a dotted key; below a mapping, what it says of the mapping.

    Raises:
        KeyError: no such key.
    """
    rule: Resume | None = None
    section = schema
    for name in key.split("."):
        field = section.model_fields[name]
        own = [marker for marker in field.metadata if isinstance(marker, Resume)]
        rule = own[0] if own else rule
        below = subsection(field)
        if below is None:
            break
        section = below
    if rule is None:
        raise KeyError(f"{key} does not say whether a resumed run may change it")
    return rule
