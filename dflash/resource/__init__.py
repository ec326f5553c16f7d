"""The `Drafter` resource: what a person declares, one pydantic model per section of the file.

The same models serve the command line, the jobs, the operator and the generated CRD, so every
field is documented, bounded and defaulted here and nowhere else. No torch, no Kubernetes.
"""

from dflash.resource.drafter import API_VERSION, KIND, Drafter, DrafterSpec

__all__ = ["API_VERSION", "KIND", "Drafter", "DrafterSpec"]
