"""The resource as a whole: identity, and the sections that make up its spec."""

from typing import Literal

from pydantic import Field

from dflash.resource.evaluation import Evaluation
from dflash.resource.generation import Generation
from dflash.resource.model import DraftModel
from dflash.resource.pods import Pods
from dflash.resource.section import Section, operational
from dflash.resource.storage import Storage, Tracking
from dflash.resource.target import Prompts, Target
from dflash.resource.training import Training

API_VERSION = "dflash.dev/v1alpha1"
KIND = "Drafter"


class Metadata(Section):
    """Kubernetes' metadata, as far as it matters here; the rest is accepted and left alone."""

    model_config = Section.model_config | {"extra": "ignore"}

    name: str = Field(
        min_length=1,
        max_length=40,
        pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$",
        description="Lower-case letters, digits and dashes, 40 at most: names of pods are made from it.",
    )
    namespace: str | None = Field(None, max_length=63, description="Namespace, on a cluster.")


class DrafterSpec(Section):
    """What to make."""

    target: Target = Field(description="The model that is served.")
    prompts: Prompts = Field(description="The questions.")
    storage: Storage = Field(description="Where state lives.")
    generation: Generation = Field(Generation(), description="The dataset stage.")
    drafter: DraftModel = Field(DraftModel(), description="The drafter's shape.")
    training: Training = Field(Training(), description="The training stage.")
    evaluation: Evaluation = Field(Evaluation(), description="The evaluation stage.")
    tracking: Tracking = Field(Tracking(), description="Metrics.")
    pods: Pods = operational(Pods(), description="On a cluster: how pods differ from the chart's.")
    rerun: str = Field("", max_length=256, description="Free text. Changing it runs every stage again.")
    suspend: bool = operational(
        False, description="true stops the work after a checkpoint and frees its resources."
    )


class Drafter(Section):
    """A DFlash drafter, declared."""

    api_version: Literal["dflash.dev/v1alpha1"] = Field(description="Version of this schema.")
    kind: Literal["Drafter"] = Field(description="Always Drafter.")
    metadata: Metadata = Field(description="Identity.")
    spec: DrafterSpec = Field(description="What to make.")
