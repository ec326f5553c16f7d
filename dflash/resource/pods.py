"""`spec.pods`: how the pods of a stage differ from the chart's, on a cluster. Unused on one machine."""

from typing import Any, Literal

from dflash.resource.section import Section, operational

PodPatch = dict[str, Any]


class Pods(Section):
    """A partial pod template for each role, laid over the chart's.

    Mappings are merged key by key, lists of named things (containers, volumes, env) by name, and
    null deletes. The container of the job is named `main`.
    """

    generate: PodPatch = operational({}, description="Pod template patch of the generation workers.")
    target: PodPatch = operational({}, description="Pod template patch of the targets.")
    drafter: PodPatch = operational({}, description="Pod template patch of the drafters.")
    evaluate: PodPatch = operational({}, description="Pod template patch of the evaluation.")

    def of(self, role: Literal["generate", "target", "drafter", "evaluate"]) -> PodPatch:
        """The patch of one role."""
        patches = {
            "generate": self.generate,
            "target": self.target,
            "drafter": self.drafter,
            "evaluate": self.evaluate,
        }
        return patches[role]
