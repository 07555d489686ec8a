"""The overlay of docs/kubernetes.md renders, and says what the page says."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import render_kubernetes

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "kubernetes.md"


@pytest.fixture
def resources(tmp_path: Path) -> list[dict[str, Any]]:
    """The overlay of the page, with the patches for a mirror, beside a clone."""
    command = render_kubernetes.find_kustomize()
    if command is None:
        pytest.skip("there is no kubectl and no kustomize")
    overlay, patches = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    own = tmp_path / "my-fumehood"
    own.mkdir()
    (own / "kustomization.yaml").write_text(overlay + patches, encoding="utf-8")
    shutil.copy(render_kubernetes.ROOT / "base" / "fumehood.yaml", own)
    shutil.copytree(render_kubernetes.ROOT, tmp_path / "fumehood" / "deploy" / "kubernetes")
    return list(yaml.safe_load_all(render_kubernetes.render(command, own)))


def test_overlay_of_the_page_has_its_registry_its_components_and_its_mirror(
    resources: list[dict[str, Any]],
) -> None:
    templates = [resource["spec"] for resource in resources if resource["kind"] == "SandboxTemplate"]
    assert len(templates) == 2
    for template in templates:
        pod = template["podTemplate"]["spec"]
        containers = {container["name"]: container for container in pod["containers"]}
        assert {container["image"] for container in pod["containers"]} == {
            "registry.example/fumehood-sandbox:0.1.0"
        }
        assert pod["runtimeClassName"] == "gvisor"
        assert [entry["name"] for entry in containers["egress"]["env"]] == ["FUMEHOOD_INDEX_URL"]
        assert template["networkPolicy"]["egress"][-1]["ports"] == [{"port": 80, "protocol": "TCP"}]


def test_paths_of_the_page_exist() -> None:
    named = re.findall(r"(?<![\w/])deploy/(?!fumehood-)[\w./-]+", PAGE.read_text(encoding="utf-8"))
    assert named
    assert [path for path in named if not (ROOT / path.rstrip(".")).exists()] == []
