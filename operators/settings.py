"""What the operator's process is told: flags, `DFLASH_OPERATOR_*` variables, defaults."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class OperatorSettings(BaseSettings):
    """Read with `OperatorSettings()`; the chart sets the variables."""

    model_config = SettingsConfigDict(env_prefix="DFLASH_OPERATOR_", frozen=True)

    namespace: str = Field(description="Namespace whose Drafters are looked after.")
    identity: str = Field(description="Name of this process in the Lease: the pod's name.")
    lease: str = Field("dflash-operator", description="Name of the Lease.")
    templates: Path = Field(Path("/etc/dflash/templates"), description="Folder with the Job templates.")
    address: str = Field("0.0.0.0", description="Address of the health and metrics endpoints.")
    port: int = Field(8080, ge=0, le=65_535, description="Port of the health and metrics endpoints.")
    network_policies: bool = Field(
        True, description="Whether each Drafter's pods get a NetworkPolicy that lets them talk to each other."
    )
    workers: int = Field(4, ge=1, le=64, description="Drafters worked on at once.")
    poll_seconds: float = Field(
        10.0, gt=0.0, le=600.0, description="How often the progress of a Drafter at work is read."
    )
    resync_seconds: float = Field(
        600.0, gt=0.0, le=86_400.0, description="How often a Drafter is looked at when nothing changes."
    )
    settled_resync_seconds: float = Field(
        3600.0, gt=0.0, le=86_400.0, description="The same for a Drafter that is ready."
    )
