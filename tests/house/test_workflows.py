"""The workflows: what a tag publishes, and which jobs may write where."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from docs.release import notes
from tests.house.source import ROOT

FOLDER = ROOT / ".github" / "workflows"
# The jobs that may write, and where.
WRITERS = {"image": {"packages": "write"}, "pypi": {"id-token": "write"}, "release": {"contents": "write"}}
PROJECT = '[project]\nversion = "1.2.0"\n'
CHANGELOG = (
    "# Changelog\n\n## 1.3.0 - Unreleased\n\n- Next.\n\n## 1.2.0 - 2026-11-02\n\n- First.\n\n## 1.1.0 - 2026-10-01\n"
)


def workflow(name: str) -> dict[str, Any]:
    """The content of a workflow; YAML 1.1 reads its key `on` as True."""
    content: dict[Any, Any] = yaml.safe_load((FOLDER / f"{name}.yml").read_text())
    return {"on" if key is True else key: value for key, value in content.items()}


def jobs() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = workflow("release")["jobs"]
    return found


def actions(job: dict[str, Any]) -> list[str]:
    return [step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step]


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yml")), ids=lambda file: file.stem)
def test_a_workflow_may_only_read(file: Any) -> None:
    """Rights to write are those of single jobs."""
    assert {"contents": "read"} == workflow(file.stem)["permissions"]


def test_only_a_tag_publishes() -> None:
    assert {"push": {"tags": ["v*"]}} == workflow("release")["on"]


def test_only_the_publishing_jobs_may_write() -> None:
    """Each to one place."""
    rights = {name: job["permissions"] for name, job in jobs().items() if "permissions" in job}

    assert {name: {k: v for k, v in job.items() if v != "read"} for name, job in rights.items()} == WRITERS


def test_pypi_knows_the_publisher_without_a_password() -> None:
    """Trusted publishing, in an environment that can ask for approval; the job runs nobody else's code."""
    job = jobs()["pypi"]

    assert job["environment"] == "pypi"
    assert actions(job) == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]
    assert all("run" not in step for step in job["steps"])
    assert not any("secrets." in file.read_text() for file in FOLDER.glob("*.yml"))


def test_nothing_is_published_before_all_is_built() -> None:
    """A name and version of PyPI cannot be used twice: the wheels go there after the image was built."""
    order = {name: set(job.get("needs", ())) for name, job in jobs().items()}

    assert order["image"] == {"notes", "wheels"}
    assert order["pypi"] == {"notes", "wheels", "image"}
    assert order["release"] == {"pypi"}


def test_what_is_downloaded_was_uploaded() -> None:
    uploaded = {
        step["with"]["name"].partition("${{")[0]
        for job in jobs().values()
        for step in job["steps"]
        if step.get("uses", "").startswith("actions/upload-artifact")
    }
    downloaded = {
        (step["with"].get("name") or step["with"]["pattern"]).rstrip("*")
        for job in jobs().values()
        for step in job["steps"]
        if step.get("uses", "").startswith("actions/download-artifact")
    }

    assert uploaded == downloaded == {"notes", "wheels-"}


def test_the_notes_are_the_section_of_the_version() -> None:
    assert notes("v1.2.0", PROJECT, CHANGELOG) == "- First.\n"


@pytest.mark.parametrize(
    ("tag", "project", "reason"),
    [
        ("v1.2.1", PROJECT, "has version 1.2.0"),
        ("v1.3.0", PROJECT.replace("1.2.0", "1.3.0"), "no section 1.3.0 with a date"),
    ],
    ids=["another version", "unreleased"],
)
def test_a_tag_without_version_or_date_publishes_nothing(tag: str, project: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        notes(tag, project, CHANGELOG)
