"""Exports while training goes on: which committed steps are exported, and how, as values. Functions here are pure."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt.errors import UsageError


@dataclass(frozen=True, slots=True)
class Export:
    """Writes weights for other tools from committed checkpoints, while training goes on: `to`/step-N.

    to: a folder on the machine of rank 0, or on a shared file system, in which nothing is deleted; or hf://USER/NAME, a
        repository of the Hugging Face Hub, of which each export is a commit.
    every: export the first committed checkpoint at or after each multiple of so many steps. The last step of the block
        is exported in any case. None: only that one.
    of: the key in `state` of the module that is exported. A PEFT model gives PEFT's folder (the adapter alone), any
        other module a folder of .safetensors files. A Hugging Face model has its config beside the weights.
    names: regular expressions with their replacements, applied to each name by re.sub, one after the other.
    dtype: floating-point tensors are converted to it, such as "bfloat16". None: as saved.
    beside: what else is copied into each folder: objects with save_pretrained(folder), such as a tokenizer, and paths.

    The agent of rank 0's node does the work, from the store, at the lowest priority. If exports take longer than the
    steps between them, the older of those that wait is left out. Errors: UsageError."""

    to: str | os.PathLike[str]
    every: int | None = None
    of: str = "model"
    names: Mapping[str, str] = field(default_factory=dict)
    dtype: str | None = None
    beside: Sequence[Any] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.to, str | os.PathLike) or not os.fspath(self.to):
            raise UsageError(f"ckpt.Export(to={self.to!r}): give a folder, or hf://USER/NAME")
        if "://" in os.fspath(self.to) and not self.repository:
            raise UsageError(
                f"ckpt.Export(to={os.fspath(self.to)!r}): give a folder, from which it can be copied to a bucket, or "
                "hf://USER/NAME"
            )
        if self.every is not None and (
            not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1
        ):
            raise UsageError(f"ckpt.Export(every={self.every!r}): give a whole number of steps, at least 1, or None")
        if isinstance(self.beside, str | os.PathLike) or not isinstance(self.beside, Sequence):
            raise UsageError(f"ckpt.Export(beside={self.beside!r}): give a list")
        if not isinstance(self.names, Mapping):
            raise UsageError(f"ckpt.Export(names={self.names!r}): give a dict of expressions and replacements")
        compile_names([*self.names.items()])

    @property
    def repository(self) -> str:
        """USER/NAME of the Hub; "" if exports go to a folder."""
        return hub_repository(self.to)


@dataclass(frozen=True, slots=True)
class ExportRule:
    """An Export as the agent gets it. `to`: a folder of this machine, also where `repository` names one of the Hub.
    `only`: globs on names. `strip`: a prefix. `format`: as of store.export. `beside`: the folder of the files that are
    copied into each export; "": none."""

    to: str
    every: int | None
    only: tuple[str, ...]
    strip: str
    names: tuple[tuple[str, str], ...]
    dtype: str | None
    format: str
    beside: str
    repository: str = ""

    def is_due(self, step: int, exported: Collection[int]) -> bool:
        """Whether this committed step is exported: it is the first one at or after a multiple of `every`."""
        if self.every is None or step < self.every:
            return False
        multiple = step - step % self.every
        return not any(multiple <= each <= step for each in exported)

    def are_alike(self, step: int, later: int) -> bool:
        """Whether only the first of these two committed steps can be due."""
        return self.every is not None and step // self.every == later // self.every

    def path(self, step: int) -> Path:
        return Path(self.to) / f"step-{step}"

    def place(self, step: int) -> str:
        """Where a user finds an export."""
        return f"hf://{self.repository}" if self.repository else str(self.path(step))


def hub_repository(to: str | os.PathLike[str]) -> str:
    """USER/NAME of hf://USER/NAME; "" for anything else."""
    found = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)", os.fspath(to))
    return found[1] if found else ""


def exported_step(name: str) -> int | None:
    """The step of a folder with this name; None for any other name."""
    found = re.fullmatch(r"step-(\d{1,18})", name)
    return int(found[1]) if found else None


def compile_names(names: Sequence[tuple[str, str]]) -> list[tuple[re.Pattern[str], str]]:
    """The regular expressions with their replacements. Errors: UsageError."""
    found = []
    for pattern, replacement in names:
        try:
            compiled = re.compile(pattern)
            compiled.sub(replacement, "")
        except (re.error, TypeError, IndexError) as exc:
            raise UsageError(f"the new name {replacement!r} for {pattern!r}: {exc}") from exc
        found.append((compiled, replacement))
    return found
