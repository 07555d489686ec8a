"""Generates tests/deploy/kubernetes_schemas.json: JSON Schemas of the resources in deploy/kubernetes.

Run `python -m tools.build_kubernetes_schemas` after a change of KINDS, or of the versions that the test cluster runs.
It needs Go, which downloads the two modules and checks their hashes.
"""

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tools.kubernetes_cluster.binaries import AGENT_SANDBOX_VERSION, KUBERNETES_VERSION

FILE = Path(__file__).resolve().parent.parent / "tests" / "deploy" / "kubernetes_schemas.json"
KUBERNETES = f"k8s.io/kubernetes@{KUBERNETES_VERSION}"
AGENT_SANDBOX = f"sigs.k8s.io/agent-sandbox@{AGENT_SANDBOX_VERSION}"
KINDS = {
    "v1": ("ConfigMap", "Namespace", "PersistentVolumeClaim", "Pod", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding"),
}
_PREFIX = "#/definitions/"
_METADATA = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
# Types that have more than one form in JSON, which OpenAPI 2 cannot say.
_UNIONS = {
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": {"type": ["integer", "string"]},
    "io.k8s.apimachinery.pkg.api.resource.Quantity": {"type": ["number", "string"]},
}
# What the definitions of agent-sandbox repeat from Kubernetes.
_EMBEDDED = {
    ("podTemplate", "spec"): "io.k8s.api.core.v1.PodSpec",
    ("volumeClaimTemplates", "spec"): "io.k8s.api.core.v1.PersistentVolumeClaimSpec",
    ("networkPolicy", "ingress"): "io.k8s.api.networking.v1.NetworkPolicyIngressRule",
    ("networkPolicy", "egress"): "io.k8s.api.networking.v1.NetworkPolicyEgressRule",
}

type Schema = dict[str, Any]


def main() -> None:
    kubernetes = json.loads(
        (_download(KUBERNETES) / "api/openapi-spec/swagger.json").read_text(encoding="utf-8")
    )["definitions"]
    kinds = dict(_find_kinds(kubernetes))
    definitions: dict[str, Schema] = {}
    resources: Schema = {}
    for kind in (f"{version}/{kind}" for version, names in KINDS.items() for kind in names):
        _collect(kinds[kind], kubernetes, definitions)
        resources[kind] = {"$ref": _PREFIX + kinds[kind]}
    for file in sorted((_download(AGENT_SANDBOX) / "k8s/crds").glob("*.yaml")):
        for kind, schema in _read_crd(yaml.safe_load(file.read_text(encoding="utf-8"))):
            resources[kind] = schema
            for name in _find_references(schema):
                _collect(name, kubernetes, definitions)
    _write(resources, definitions)


def _download(module: str) -> Path:
    done = subprocess.run(["go", "mod", "download", "-json", module], capture_output=True, check=True)
    return Path(json.loads(done.stdout)["Dir"])


def _find_kinds(definitions: Mapping[str, Schema]) -> Iterator[tuple[str, str]]:
    for name, schema in definitions.items():
        for found in schema.get("x-kubernetes-group-version-kind", ()):
            group = f"{found['group']}/" if found["group"] else ""
            yield f"{group}{found['version']}/{found['kind']}", name


def _collect(name: str, source: Mapping[str, Schema], collected: dict[str, Schema]) -> None:
    """Add a definition and all that it refers to."""
    if name in collected:
        return
    schema = collected[name] = _UNIONS.get(name) or _to_strict(source[name])
    for reference in _find_references(schema):
        _collect(reference, source, collected)


def _find_references(schema: Schema) -> list[str]:
    return sorted(set(re.findall(rf'"\$ref": "{_PREFIX}([^"]+)"', json.dumps(schema))))


def _to_strict(schema: Schema) -> Schema:
    """Without descriptions and extensions, and refusing unknown fields, as the API server does when it is asked to."""
    strict: Schema = {
        key: value
        for key, value in schema.items()
        if key not in ("description", "default") and not key.startswith("x-kubernetes-")
    }
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            strict[key] = _to_strict(schema[key])
    if "properties" in schema:
        strict["properties"] = {name: _to_strict(value) for name, value in schema["properties"].items()}
        strict.setdefault("additionalProperties", False)
    return strict


def _read_crd(crd: Schema) -> Iterator[tuple[str, Schema]]:
    spec = crd["spec"]
    for version in spec["versions"]:
        schema = version["schema"]["openAPIV3Schema"]
        for (field, embedded), definition in _EMBEDDED.items():
            _replace_embedded(schema["properties"]["spec"]["properties"], field, embedded, definition)
        schema["properties"]["metadata"] = {"$ref": _PREFIX + _METADATA}
        yield f"{spec['group']}/{version['name']}/{spec['names']['kind']}", _to_strict(schema)


def _replace_embedded(fields: Schema, field: str, embedded: str, definition: str) -> None:
    if field not in fields:
        return
    inner = fields[field].get("items", fields[field])["properties"]
    reference = {"$ref": _PREFIX + definition}
    is_list = inner[embedded].get("type") == "array"
    inner[embedded] = {"type": "array", "items": reference} if is_list else reference


def _write(resources: Schema, definitions: Mapping[str, Schema]) -> None:
    """Write one definition a line."""
    comment = (
        f"Generated by tools/build_kubernetes_schemas.py from {KUBERNETES} and {AGENT_SANDBOX}, "
        "copyright The Kubernetes Authors, Apache License 2.0."
    )
    parts = [f'"$comment": {json.dumps(comment)}']
    for name, members in (("resources", resources), ("definitions", definitions)):
        lines = ",\n".join(
            f"{json.dumps(key)}: {json.dumps(members[key], sort_keys=True)}" for key in sorted(members)
        )
        parts.append(f'"{name}": {{\n{lines}\n}}')
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
