"""What every section of the resource has in common: camelCase in files, strict, immutable.

A field marked with `operational()` says how or where the work is done, not what comes out of it,
so changing it never makes a stage's output stale (`dflash.resource.hashes` leaves it out).
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

OPERATIONAL = "x-dflash-operational"


class Section(BaseModel):
    """Base of all sections. Unknown fields are refused; values never change after loading."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=False,
        ser_json_inf_nan="constants",
    )


def operational(default: Any = ..., **kwargs: Any) -> Any:
    """A pydantic field that is not an input of its stage: replicas, placement, limits, deadlines."""
    return Field(default, json_schema_extra={OPERATIONAL: True}, **kwargs)
