"""Compare the launch files in examples/cluster with their operators' schemas.

cluster_schemas.py CRD...: files with CustomResourceDefinitions, such as volcano's
config/crd/volcano/bases/batch.volcano.sh_jobs.yaml and Kubeflow's
manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml. A field that is not in the schema is reported as a
fault, as by `kubectl create --validate=strict`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "cluster"


def schemas(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the schemas in a file, by apiVersion and kind."""
    found = {}
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        if not document or document.get("kind") != "CustomResourceDefinition":
            continue
        spec = document["spec"]
        for version in spec["versions"]:
            key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
            found[key] = version["schema"]["openAPIV3Schema"]
    return found


def faults(value: Any, schema: dict[str, Any], place: str = "") -> Iterator[str]:
    """Yield a description of each way in which a value violates a schema."""
    kind = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        kind = "int-or-string"
    if kind and (not isinstance(value, TYPES[kind]) or isinstance(value, bool) != (kind == "boolean")):
        yield f"{place or 'all of it'} is {value!r}, not of type {kind}"
    elif value not in schema.get("enum", [value]):
        yield f"{place} is {value!r}, not one of {schema['enum']}"
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from faults(each, schema.get("items", {}), f"{place}[{number}]")
    elif isinstance(value, dict):
        yield from _faults_of_fields(value, schema, place)


TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "int-or-string": (int, str),
}


def _faults_of_fields(value: dict[str, Any], schema: dict[str, Any], place: str) -> Iterator[str]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    yield from (f"{place} lacks {name}" for name in schema.get("required", []) if name not in value)
    for name, each in value.items():
        inner = known.get(name, others)
        if inner is not None:
            yield from faults(each, inner, f"{place}.{name}".lstrip("."))
        elif known and not schema.get("x-kubernetes-preserve-unknown-fields"):
            yield f"{place} has no field {name}"


def main(paths: list[str]) -> int:
    """Print all faults; return 1 if there are any, or 2 if there was nothing to compare."""
    known = {key: schema for path in paths for key, schema in schemas(Path(path)).items()}
    compared = wrong = 0
    for path in sorted(FOLDER.glob("*.yaml")):
        manifest = yaml.safe_load(path.read_text(encoding="utf-8"))
        schema = known.get((manifest.get("apiVersion"), manifest.get("kind")))
        if schema is None:
            print(f"{path.name}: no schema given")
            continue
        found = list(faults(manifest, schema))
        compared, wrong = compared + 1, wrong + bool(found)
        print(f"{path.name}: {'; '.join(found) or 'as its schema has it'}")
    return 2 if not compared else int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
