"""The CustomResourceDefinition, generated from the models of `dflash.resource` and `operators.status`.

    python -m operators.crd > charts/crds/drafters.dflash.dev.yaml

Pydantic's JSON schema is turned into a structural schema: references inlined, `null` alternatives
into `nullable`. What pydantic's
validators check across fields is said again in CEL (`RULES`), so that `kubectl apply` refuses what
`dflash validate` refuses. A test keeps the file, this and the models the same.
"""

import hashlib
import sys
from typing import Any

import orjson
import yaml

from dflash.resource import API_VERSION, KIND, DrafterSpec
from operators.kube import Kube
from operators.status import DrafterStatus

Schema = dict[str, Any]

GROUP, VERSION = API_VERSION.split("/")
PLURAL = "drafters"
NAME = f"{PLURAL}.{GROUP}"
SCHEMA_HASH = f"{GROUP}/schema-hash"
"""Annotation of the CRD by which a person sees which schema is installed."""

COLUMNS = [
    ("Stage", "string", ".status.stage", "The stage at work, or Done"),
    ("Phase", "string", ".status.phase", "What the stage is doing"),
    ("Progress", "string", ".status.progress.summary", "How far the stage is"),
    ("Acceptance", "string", ".status.acceptanceLength", "Acceptance length of the drafter"),
    ("Attempt", "integer", ".status.attempt", "Training attempt"),
    ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status', "Whether the drafter is published"),
    ("Age", "date", ".metadata.creationTimestamp", "Age"),
]

# What crosses fields, by place in the spec: (rule, message). `dflash.resource` has the same in Python.
RULES: dict[str, list[tuple[str, str]]] = {
    "storage.uri": [
        (
            "self.startsWith('s3://')",
            "on a cluster storage.uri must be s3://bucket/prefix, since pods on other nodes must reach it",
        )
    ],
    "drafter": [
        (
            "!has(self.slidingWindow) || self.slidingWindow == 0 || self.slidingWindow >= self.blockSize",
            "slidingWindow must be at least blockSize, or 0 for none",
        ),
        (
            "!has(self.layerTypes) || size(self.layerTypes) == self.layers",
            "layerTypes must have one entry per layer",
        ),
        (
            "!has(self.layerTypes) || (has(self.slidingWindow) && self.slidingWindow > 0) || "
            "!('sliding_attention' in self.layerTypes)",
            "layerTypes has sliding layers, so slidingWindow must be given",
        ),
    ],
    "drafter.taps": [("self.isSorted()", "taps must be ascending and without repeats")],
    "evaluation": [
        (
            "!has(self.rival) || !(self.rival.name in ['none', 'mtp', 'dflash'])",
            "rival.name must not be none, mtp or dflash",
        ),
        (
            "self.servers.all(s, s.contender in ['none', 'mtp', 'dflash'] || "
            "(has(self.rival) && s.contender == self.rival.name))",
            "servers: contender must be none, mtp, dflash or the rival's name",
        ),
    ],
    "tracking": [
        (
            "!has(self.costLimit) || (has(self.gpuHourPrice) && self.gpuHourPrice > 0.0)",
            "costLimit needs gpuHourPrice, from which the cost follows",
        )
    ],
    "training": [
        ("self.minTargets <= self.maxTargets", "minTargets must not be above maxTargets"),
        ("self.drafters <= self.batchSize", "drafters must not be above batchSize; raise batchSize"),
        (
            "(self.evaluation.everySteps == 0 && self.evaluation.everyMinutes == 0.0) || "
            "self.evaluation.waitSeconds < self.progressDeadlineSeconds",
            "evaluation.waitSeconds must be below progressDeadlineSeconds",
        ),
        (
            "self.targetDevices == 1 || "
            "(self.evaluation.everySteps == 0 && self.evaluation.everyMinutes == 0.0)",
            "evaluation while training needs targetDevices 1",
        ),
    ],
    "training.evaluation": [
        (
            "self.everySteps > 0 || self.everyMinutes > 0.0 || "
            "(!has(self.stop.minAcceptanceLength) && self.stop.patience == 0)",
            "stop needs measurements: set everySteps or everyMinutes",
        )
    ],
    "training.targets": [
        (
            "type(self) == int ? (self >= 1 && self <= 4096) : self == 'auto'",
            "targets must be 1 to 4096, or auto",
        )
    ],
}
_LIST_TYPES: dict[str, Schema] = {
    "drafter.taps": {"x-kubernetes-list-type": "set"},
    "evaluation.servers": {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["contender"]},
    "evaluation.prompts": {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    "stages": {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    "conditions": {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
}
_KEPT = (
    "description",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
    "pattern",
)


def crd() -> Schema:
    """The whole definition, as a plain object."""
    schema = {
        "type": "object",
        "description": "A DFlash drafter, declared.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(DrafterSpec.model_json_schema(by_alias=True)),
            "status": structural(DrafterStatus.model_json_schema(by_alias=True), defaults=False),
        },
        "x-kubernetes-validations": [
            {
                "rule": "size(self.metadata.name) <= 40 && !self.metadata.name.contains('.')",
                "message": "metadata.name must be at most 40 lower-case letters, digits and dashes: "
                "names of pods are made from it",
            }
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME, "annotations": {SCHEMA_HASH: _digest(schema)}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["dfd"],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path, "description": text}
                        for name, kind, path, text in COLUMNS
                    ],
                }
            ],
        },
    }


def _digest(schema: Schema) -> str:
    return hashlib.sha256(orjson.dumps(schema, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def missing_fields(kube: Kube) -> list[str]:
    """Fields that the cluster's CRD lacks: it would drop them from what is applied and remembered.

    Read from the API server's published schema, which every ServiceAccount may read.
    """
    published = kube.published_schema(API_VERSION, KIND)
    ours = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts = ("spec", "status")
    wanted = {path for part in parts for path in _paths(ours["properties"][part], part)}
    return sorted(wanted - {path for part in parts for path in _paths(published["properties"][part], part)})


def _paths(node: Schema, path: str) -> set[str]:
    found = {path}
    for name, child in node.get("properties", {}).items():
        found |= _paths(child, f"{path}.{name}")
    if "items" in node:
        found |= _paths(node["items"], f"{path}[]")
    return found


def structural(schema: Schema, defaults: bool = True) -> Schema:
    """A JSON schema from pydantic as a structural schema, with list types and CEL rules added."""
    return _convert(schema, schema.get("$defs", {}), "", defaults)


def _convert(node: Schema, definitions: Schema, path: str, defaults: bool) -> Schema:
    node, nullable = _resolve(node, definitions)
    result: Schema = {key: node[key] for key in _KEPT if key in node}
    if nullable:
        result["nullable"] = True
    for bound in ("Minimum", "Maximum"):  # OpenAPI 3.0 has a flag where JSON schema has a number
        if f"exclusive{bound}" in node:
            result[bound.lower()] = node[f"exclusive{bound}"]
            result[f"exclusive{bound}"] = True
    if "anyOf" in node:
        if {"integer", "string"} != {entry["type"] for entry in node["anyOf"]}:
            raise ValueError(f"{path}: no structural schema for alternatives {node['anyOf']}")
        result["x-kubernetes-int-or-string"] = True
    else:
        result["type"] = node["type"]
    if "const" in node or "enum" in node:
        result["enum"] = node.get("enum") or [node["const"]]
    if node.get("type") == "object":
        result |= _object(node, definitions, path, defaults)
    elif node.get("type") == "array":
        # A tuple: pydantic says one schema per place, a structural schema has one for all.
        items = node.get("items") or node["prefixItems"][0]
        result["items"] = _convert(items, definitions, f"{path}[]", defaults)
        result |= _LIST_TYPES.get(path, {"x-kubernetes-list-type": "atomic"})
    if path in RULES:
        result["x-kubernetes-validations"] = [{"rule": rule, "message": text} for rule, text in RULES[path]]
    return result


def _object(node: Schema, definitions: Schema, path: str, defaults: bool) -> Schema:
    if node.get("additionalProperties") is True:  # free form: a pod template patch
        return {"x-kubernetes-preserve-unknown-fields": True}
    if "properties" not in node:
        return {
            "additionalProperties": _convert(node["additionalProperties"], definitions, f"{path}.*", defaults)
        }
    required = set(node.get("required", []))
    properties = {}
    for name, child in node["properties"].items():
        place = f"{path}.{name}" if path else name
        properties[name] = _convert(child, definitions, place, defaults)
        if not defaults or name in required or child.get("default") is None:
            continue
        # Written out for sections too: their CEL rules are tried on the default as it stands.
        properties[name]["default"] = _without_nulls(child["default"])
    return {"properties": properties} | ({"required": sorted(required)} if required else {})


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _resolve(node: Schema, definitions: Schema) -> tuple[Schema, bool]:
    """Follow a reference and drop a `null` alternative; says whether there was one."""
    if "$ref" in node:
        return {
            **definitions[node["$ref"].rpartition("/")[2]],
            **{k: v for k, v in node.items() if k != "$ref"},
        }, False
    if "allOf" in node and len(node["allOf"]) == 1:
        return _resolve({**{k: v for k, v in node.items() if k != "allOf"}, **node["allOf"][0]}, definitions)
    if "anyOf" not in node:
        return node, False
    outer = {key: value for key, value in node.items() if key != "anyOf"}
    real = [entry for entry in node["anyOf"] if entry.get("type") != "null"]
    nullable = len(real) < len(node["anyOf"])
    if len(real) > 1:
        return {**outer, "anyOf": real}, nullable
    inner, _ = _resolve(real[0], definitions)
    return {**inner, **outer}, nullable


def to_yaml() -> str:
    """The definition as the file in the chart."""
    head = "# Generated from the resource's models by `python -m operators.crd`: do not edit.\n"
    return head + yaml.safe_dump(crd(), sort_keys=False, width=110)


if __name__ == "__main__":
    sys.stdout.write(to_yaml())
